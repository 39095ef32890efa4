"""Graphs that stay on SSD: pages read as a walk comes to them."""
