"""``ESPNX_LOG=debug`` shows on standard error what was decided, and why: which path bytes take,
what computes, what is prefetched.

Every module writes to a logger of its own name below ``espnx``, by Python's `logging`; a program
that sets logging up itself needs no variable, nor this module, a file of its own that is imported
where the variable is set. Debug is what was decided; warnings are those of `warnings`, which this
does not change.
"""

from __future__ import annotations

import logging
import os
import warnings

VARIABLE = "ESPNX_LOG"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
_FORMAT = "%(relativeCreated)8.0f ms  %(name)s: %(message)s"


def from_environment() -> None:
    """Follows the variable, where it is set. Another word than a level is warned of: a typing error
    there stops no program."""
    word = os.environ.get(VARIABLE, "").strip().lower()
    if word in LEVELS:
        to_stderr(LEVELS[word])
    elif word:
        warnings.warn(f"{VARIABLE}; got {word!r}; expected {', '.join(LEVELS)}", stacklevel=2)


def to_stderr(level: int) -> None:
    """Messages of espnx from that level on go to standard error, once however often this is
    called."""
    logger = logging.getLogger("espnx")
    logger.setLevel(level)
    if not any(getattr(handler, "is_of_espnx", False) for handler in logger.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        handler.is_of_espnx = True  # type: ignore[attr-defined]
        logger.addHandler(handler)
