"""Indexes that other programs wrote, as espnx stores."""
