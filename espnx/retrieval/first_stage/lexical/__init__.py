"""Posting lists that stay on SSD: words, and weights of terms."""
