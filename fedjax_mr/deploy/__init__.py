"""The same strategies on real clients, through Flower; needs the extra ``deploy`` and nothing of it in a simulation."""
