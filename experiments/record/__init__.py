"""What only this project's own documents need: which published results replicate, and the tables of kept runs."""
