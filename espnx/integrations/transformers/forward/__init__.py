"""A forward pass through a cache: positions, masks, projections, attention, and what is kept of it
meanwhile."""
