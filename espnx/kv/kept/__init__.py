"""Caches that outlive their process: named, fingerprinted, opened again and continued exactly."""
