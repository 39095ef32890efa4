"""Commands that make graphs and change them."""
