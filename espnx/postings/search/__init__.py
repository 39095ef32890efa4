"""Searches over open segments: whole lists in one plan a query, or two steps."""
