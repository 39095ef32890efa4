"""espnx."""
