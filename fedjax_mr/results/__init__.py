"""The results of a run on the disk: evaluations, tables of kept runs, and what verifies and locks them."""
