"""Devices that do their work for real, and count it as done when the hardware of a spec would
have."""
