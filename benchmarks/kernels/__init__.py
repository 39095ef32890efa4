"""GPU kernels on the device, verified first, beside a copy within its memory and beside peers."""
