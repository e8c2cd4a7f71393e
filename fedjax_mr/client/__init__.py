"""One client: its samples, its training and its tests. Strategies use these functions; the engine batches them."""
