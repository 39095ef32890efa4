"""Multi-vector search from SSD: build, first stage, prefetch, re-rank.

documents -> spool -> arrange (first stage, list order) -> segments -> manifest
query -> encoder -> first stage, two steps -> reads -> MaxSim in place -> ranking
"""
