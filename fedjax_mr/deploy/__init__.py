"""Strategies on real clients, through Flower (extra ``deploy``). Simulations do not need this package."""
