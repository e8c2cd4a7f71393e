"""Diagnostics from run folders; one command, one file: ``python -m fedjax_mr.analysis COMMAND RUN ... [--option]``."""
