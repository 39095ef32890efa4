"""What devices do with single vectors: distances to clusters of them, walks over graphs of them,
and encoding texts into them."""
