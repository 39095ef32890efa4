"""The same job done by espnx and by other programs, each in an environment of its own."""
