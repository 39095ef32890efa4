"""Several tokens from one pass over K and V on SSD, measured."""
