"""Posting lists on devices that scan them: the verb, its command byte for byte, and the plain
SSD."""

from __future__ import annotations

from .command import LIST, PARTIAL, SCAN, SCAN_REPLY, WEIGHT, Rule, ScanCommand, ScanLists, Weights
from .device import SsdPostingsDevice
from .interface import PostingLists, PostingsDevice, ScanTicket

__all__ = [
    "LIST",
    "PARTIAL",
    "SCAN",
    "SCAN_REPLY",
    "WEIGHT",
    "PostingLists",
    "PostingsDevice",
    "Rule",
    "ScanCommand",
    "ScanLists",
    "ScanTicket",
    "SsdPostingsDevice",
    "Weights",
]
