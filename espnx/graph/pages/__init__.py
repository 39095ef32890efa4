"""A graph's directory and its pages: read and checked, and the folders that pages lie in."""
