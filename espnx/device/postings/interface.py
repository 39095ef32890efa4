"""What a device offers for posting lists, and all that its users see of it: `PostingsDevice` scans
the lists of a query and gives the best records back.

Threads: every call may come from any thread at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from ...storage import FileHandle, NativeEngine
from ..interface import Device
from ..vectors.interface import Ticket
from .command import Rule, ScanCommand, ScanLists, Weights


class PostingLists(Protocol):
    """Posting lists on storage, as a device that scans them needs to know them."""

    @property
    def path(self) -> str:
        """The path of the file in which they lie."""

    @property
    def begin_bytes(self) -> int:
        """The place in it where they begin."""

    @property
    def n_records(self) -> int:
        """Their numbers begin at 0."""

    def open(self, engine: NativeEngine) -> Sequence[FileHandle]:
        """Opens their files. The device closes them."""

    def view(self, rule: Rule, allowed: torch.Tensor | None) -> dict[str, Any]:
        """What the compiled part is told of them (csrc/bindings/postings_search.cpp), once they are
        open.

        Args:
            rule: how counts become scores.
            allowed: uint8 [ceil(records / 8)], or None.
        """


class ScanTicket(Ticket, Protocol):
    """Lists that are being read, and scored when the ticket is finished."""

    def finish(self) -> np.ndarray:
        """Waits for the lists and scores their records: `SCAN_REPLY` [at most k], or `PARTIAL`
        [postings] of a command whose k is 0."""

    @property
    def command(self) -> ScanCommand:
        """What crosses the link of a device that scans by itself."""

    @property
    def other_terms(self) -> np.ndarray:
        """int64: places, among the lists of the command, of those that are of another term; they
        are not in the reply. Once it is finished."""


class PostingsDevice(Device, Protocol):
    """A place for posting lists that scores their records by itself: one command a query."""

    @property
    def lists(self) -> PostingLists: ...

    def scan(
        self,
        lists: ScanLists,
        weights: Weights,
        k: int,
        *,
        allowed: np.ndarray | None = None,
        deadline_s: float = 30.0,
    ) -> ScanTicket:
        """Starts reading lists, for the k best records of a query.

        Args:
            lists: in the order in which a record's parts are summed, in float32.
            weights: of each, of the same length.
            k: records wanted; 0: every posting's part of the score, of each list by itself.
            allowed: uint8 [ceil(records / 8)]: bit i % 8 of byte i / 8 says whether record i may be
                found; None: all may. Not with a k of 0.
            deadline_s: of the reads.

        Raises InvalidInputError; what reading raises.
        """
