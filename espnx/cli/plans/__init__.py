"""What `espnx plan` says of graphs, indexes and posting lists."""
