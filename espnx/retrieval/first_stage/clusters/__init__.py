"""Lists of vectors that stay on SSD, of which a search reads the nearest, all at once."""
