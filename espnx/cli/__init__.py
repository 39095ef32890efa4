"""The command line: what every subcommand shares, and the list of them. Importing this package, or
asking for help, imports no torch."""
