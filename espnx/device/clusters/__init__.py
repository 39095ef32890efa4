"""Clusters of vectors on storage: the file, the device that measures them, and the host's two
algorithms over it."""

from __future__ import annotations

from .device import SsdClusterDevice, open_clusters
from .layout import ClusterFile, ClusterSections
from .nearest import nearest_by_command, nearest_by_read
from .write import write_clusters

__all__ = [
    "ClusterFile",
    "ClusterSections",
    "SsdClusterDevice",
    "nearest_by_command",
    "nearest_by_read",
    "open_clusters",
    "write_clusters",
]
