"""Stored rows read into GPU memory, checked and attended to there."""
