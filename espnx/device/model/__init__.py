"""What devices are: specs in YAML, each figure with where it is from."""
