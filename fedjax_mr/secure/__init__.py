"""Layers exchanged among clients: what the exchange hides, simulated, and the encrypted messages."""
