"""Indexes and corpora that other programs wrote."""
