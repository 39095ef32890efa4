"""Measurements beside baselines: a registry of cases, a runner, baselines, and tables rendered from
result files.

The files lie in ``benchmarks/`` and import as ``espnx.benchmarks``. A new case is a room with a
``case.py``; see `harness.registry`.
"""
