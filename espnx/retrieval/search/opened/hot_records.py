"""Hot documents: records that many queries want, kept in RAM within an explicit budget.

A ring of bytes. A record enters at its second read and leaves when the ring comes round to it, so
that one pass over the corpus does not drive out what is wanted often. Readers take no lock: they
score in place and look afterwards whether the ring came round meanwhile.
"""

from __future__ import annotations

import threading

import numpy as np
import torch

from .... import errors
from ....device.gpu.staging import host_memory
from ....device.interface import RecordQuery
from ....device.records.score import score
from ....sizes import format_size
from ...store.tier import Tier

_PASSES_BEFORE_FORGETTING = 4


class HotRecords:
    """See the module.

    Args:
        tier: whose records are kept, as they lie on disk.
        budget_bytes: of the ring, at least 1; no more is taken than all records need. Beside it 9
            bytes a document of the store are taken (`resident_bytes`).

    Raises InvalidInputError where there is not so much memory.
    """

    def __init__(self, tier: Tier, budget_bytes: int):
        self._tier = tier
        records = len(tier.n_tokens)
        self.budget_bytes = min(budget_bytes, int(tier.schema.sizes(tier.n_tokens).sum()))
        try:
            self._memory = torch.empty(self.budget_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            size = format_size(self.budget_bytes)
            raise errors.InvalidInputError(
                "hot", got=size, expected="no more than the memory there is", fix="a smaller hot="
            ) from error
        self._bytes = self._memory.numpy()
        # A record's place as a count of bytes ever written, -1 for none: overwritten once `_head`
        # is more than a ring ahead of it.
        self._place = np.full(records, -1, dtype=np.int64)
        self._seen = np.zeros(records, dtype=bool)
        self._head = 0
        self._seen_since = 0
        self._lock = threading.Lock()

    @property
    def resident_bytes(self) -> int:
        return self._memory.nbytes + self._place.nbytes + self._seen.nbytes

    def _is_here(self, place: np.ndarray) -> np.ndarray:
        return (place >= 0) & (self._head - place <= self.budget_bytes)

    def score(self, numbers: np.ndarray, query: RecordQuery) -> tuple[np.ndarray, np.ndarray]:
        """(bool [n]: which were here, float32: their scores)."""
        place = self._place[numbers]
        found = self._is_here(place)
        if not found.any():
            return found, np.empty(0, np.float32)
        at = place[found] % self.budget_bytes
        if query.tokens.device == self._memory.device:
            scores = score(self._tier, self._memory, torch.from_numpy(at), numbers[found], query)
        else:
            gathered, begin = self._gathered(numbers[found], at, query.tokens.device)
            scores = score(self._tier, gathered, begin, numbers[found], query)
        still = self._is_here(place[found])  # the ring may have come round while we read
        found[np.flatnonzero(found)[~still]] = False
        return found, scores[still]

    def _gathered(
        self, numbers: np.ndarray, at: np.ndarray, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of records on a GPU, and where each begins in it: they are a small part of the
        ring."""
        sizes = self._tier.schema.sizes(self._tier.n_tokens[numbers])
        begin = np.cumsum(sizes) - sizes
        staged = host_memory(int(sizes.sum()), device)
        target = staged.numpy()
        for to, source, size in zip(begin.tolist(), at.tolist(), sizes.tolist(), strict=True):
            target[to : to + size] = self._bytes[source : source + size]
        return staged.to(device, non_blocking=True), torch.from_numpy(begin)

    def admit(self, numbers: np.ndarray, memory: torch.Tensor, positions: torch.Tensor) -> None:
        """Keeps those of the records just read (and checked) that were read before. Does nothing
        while another thread is at it.

        `memory`: where they were read to. On a GPU, those that are kept come back in one copy.
        """
        if not len(numbers) or not self._lock.acquire(blocking=False):
            return
        try:
            again = self._seen[numbers] & ~self._is_here(self._place[numbers])
            self._note_seen(numbers)
            if not again.any():
                return
            kept = numbers[again]
            sizes, where = (
                self._tier.schema.sizes(self._tier.n_tokens[kept]),
                positions.numpy()[again],
            )
            if memory.is_cuda:
                pieces = [
                    memory[begin : begin + size]
                    for begin, size in zip(where.tolist(), sizes.tolist(), strict=True)
                ]
                memory, where = torch.cat(pieces).cpu(), np.cumsum(sizes) - sizes
            source = memory.numpy()
            for number, begin, size in zip(
                kept.tolist(), where.tolist(), sizes.tolist(), strict=True
            ):
                self._put(number, source[begin : begin + size])
        finally:
            self._lock.release()

    def _note_seen(self, numbers: np.ndarray) -> None:
        """Forgets who was seen once a few rings' worth went by: twice in a year is not often."""
        self._seen_since += int(self._tier.schema.sizes(self._tier.n_tokens[numbers]).sum())
        if self._seen_since > _PASSES_BEFORE_FORGETTING * self.budget_bytes:
            self._seen[:] = False
            self._seen_since = 0
        self._seen[numbers] = True

    def _put(self, number: int, record: np.ndarray) -> None:
        size, begin = len(record), self._head
        if size > self.budget_bytes:
            return
        if begin % self.budget_bytes + size > self.budget_bytes:  # records do not wrap
            begin += self.budget_bytes - begin % self.budget_bytes
        # First the head, then the bytes: a reader that began before sees in time that its bytes are
        # gone.
        self._head = begin + size
        at = begin % self.budget_bytes
        self._bytes[at : at + size] = record
        self._place[number] = begin
