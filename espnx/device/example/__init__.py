"""A device of another package, the least that works. `espnx device skeleton` writes its files;
docs/device-plugin.md explains them."""
