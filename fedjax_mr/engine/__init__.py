"""How clients train, whatever the strategy; nothing here knows a configuration, a folder or a file."""
