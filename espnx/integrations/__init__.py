"""What joins espnx to other packages. Nothing here is imported until it is asked for."""
