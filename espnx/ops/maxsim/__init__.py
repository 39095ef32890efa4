"""MaxSim (late interaction): scores token matrices of documents, in place in an I/O buffer, against
token matrices of queries."""

from __future__ import annotations

from .api import maxsim
from .codebook import Codebook
from .formats import FORMATS, TokenFormat, token_format, token_row_bytes
from .reference import maxsim_reference

__all__ = [
    "FORMATS",
    "Codebook",
    "TokenFormat",
    "maxsim",
    "maxsim_reference",
    "token_format",
    "token_row_bytes",
]
