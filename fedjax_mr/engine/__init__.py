"""Training and tests of clients, independent of the strategy, the configuration and the run folder."""
