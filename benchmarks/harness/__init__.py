"""What every case is run with: the registry, systems in turns, result files, processes."""
