"""What `espnx simulate` says of boards, of decoders, and of how far to believe it."""
