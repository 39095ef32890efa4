"""The command line: one file per subcommand. Importing this package, or asking for help, imports no torch."""
