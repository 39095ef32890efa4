"""Stored graphs as parts of near-storage devices."""
