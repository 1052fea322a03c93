"""What the command line does, a module per command."""
