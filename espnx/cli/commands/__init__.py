"""One file per subcommand: `configure(parser)` and `run(args)`. Each is imported when it is asked
for."""
