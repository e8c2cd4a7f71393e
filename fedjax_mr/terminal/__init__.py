"""What commands share: Ctrl-C and signals, standard streams, help, errors in one line, exit codes."""
