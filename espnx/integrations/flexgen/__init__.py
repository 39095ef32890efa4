"""FlexGen with its disk kept by espnx."""
