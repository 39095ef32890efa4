"""Builds that keep to a limit of memory, and go on where they were interrupted.

Vectors are divided among parts that overlap, a graph is built of each part, and their edges are
merged (DiskANN, section 4.2). Everything goes through files in a work folder, in order: nothing but
a few bytes a vector is in memory at once.
"""

from .builder import Seconds, build_bounded

__all__ = ["Seconds", "build_bounded"]
