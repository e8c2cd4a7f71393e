"""From flags, a folder or Python to a configuration: settings, their help, their titles, and what a user imports."""
