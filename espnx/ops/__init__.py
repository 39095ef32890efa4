"""Tensor ops on bytes that lie where the I/O engine put them. Each folder holds one op: reference,
checked call, CUDA launcher.

The ops are ``torch.ops.espnx.*``; the functions here check their arguments first and explain what
is wrong with them. Where nobody needs to see the call, they go to the compiled version without
torch's dispatcher.
"""

from __future__ import annotations

from .attention import attention, attention_reference, merge
from .crc32c import crc32c, crc32c_ranges, crc32c_ranges_reference, crc32c_reference
from .distances import distances, distances_reference
from .maxsim import maxsim, maxsim_reference, token_format, token_row_bytes
from .postings import postings, postings_reference

__all__ = [
    "attention",
    "attention_reference",
    "crc32c",
    "crc32c_ranges",
    "crc32c_ranges_reference",
    "crc32c_reference",
    "distances",
    "distances_reference",
    "maxsim",
    "maxsim_reference",
    "merge",
    "postings",
    "postings_reference",
    "token_format",
    "token_row_bytes",
]
