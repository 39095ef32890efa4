"""Triton kernels, and nothing else: no dispatch, no allocation. Imports as ``espnx.kernels``."""
