"""The command line: the only part that prints, and the only one that knows exit codes."""
