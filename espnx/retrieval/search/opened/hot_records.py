"""Hot documents: records that many queries want, kept in RAM within an explicit budget.

A ring of bytes. A record enters at its second read and leaves when the ring comes round to it, so
that one pass over the corpus does not drive out what is wanted often. Readers take no lock: they
score in place and look afterwards whether the ring came round meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from .... import errors
from ....device.gpu.findings import Findings, event_behind_now
from ....device.gpu.staging import Tables, host_memory
from ....device.interface import RecordQuery
from ....device.records.score import score, score_there
from ....sizes import format_size
from ....streams import Event, streams_of
from ...store.tier import Tier

_PASSES_BEFORE_FORGETTING = 4
_COMING_BYTES = 64 << 20  # of records on their way from a GPU


@dataclass
class _Coming:
    """Records on their way from a GPU into the ring, one after the other in `memory`. `source`:
    where they were read to, which nobody else may write before they have been copied."""

    numbers: np.ndarray
    size_bytes: np.ndarray
    memory: torch.Tensor
    source: torch.Tensor
    copied: Event


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
        self._coming: list[_Coming] = []
        self._lock = threading.Lock()

    @property
    def resident_bytes(self) -> int:
        return self._memory.nbytes + self._place.nbytes + self._seen.nbytes

    def _is_here(self, place: np.ndarray) -> np.ndarray:
        return (place >= 0) & (self._head - place <= self.budget_bytes)

    def score(
        self, numbers: np.ndarray, query: RecordQuery
    ) -> tuple[np.ndarray, Callable[[], np.ndarray]]:
        """(bool [n]: which were here, a function that waits for their scores, float32)."""
        if self._coming and self._lock.acquire(blocking=False):
            try:
                self._take_what_came()
            finally:
                self._lock.release()
        place = self._place[numbers]
        found = self._is_here(place)
        if not found.any():
            return found, lambda: np.empty(0, np.float32)
        here, at, device = numbers[found], place[found] % self.budget_bytes, query.tokens.device
        if device == self._memory.device:
            scores = score(self._tier, self._memory, torch.from_numpy(at), here, query)
            wait = lambda: scores  # noqa: E731
        else:
            gathered, begin = self._gathered(here, at, device)
            wait = self._score_there(gathered, begin, here, query)
        still = self._is_here(place[found])  # the ring may have come round while we read
        found[np.flatnonzero(found)[~still]] = False
        return found, lambda: wait()[still]

    def _score_there(
        self, memory: torch.Tensor, begin: torch.Tensor, numbers: np.ndarray, query: RecordQuery
    ) -> Callable[[], np.ndarray]:
        """Scores of records on a GPU: queued there, and waited for when they are needed."""
        if streams_of(memory.device) is None:
            scores = score(self._tier, memory, begin, numbers, query)
            return lambda: scores
        put = Tables(memory.device).put
        findings = Findings(None, [score_there(self._tier, memory, begin, numbers, query, put)])

        def wait() -> np.ndarray:
            findings.wait()
            return findings.take()[1]

        return wait

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

        `memory`: where they were read to. On a GPU, those that are kept come back in one copy,
        which nobody waits for: they are here at the next call after it. No more than 64 MiB, and
        than the ring holds, are on their way.
        """
        if not len(numbers) or not self._lock.acquire(blocking=False):
            return
        try:
            self._take_what_came()
            again = self._seen[numbers] & ~self._is_here(self._place[numbers])
            self._note_seen(numbers)
            for each in self._coming:
                again &= ~np.isin(numbers, each.numbers)
            sizes = self._tier.schema.sizes(self._tier.n_tokens[numbers[again]])
            if memory.is_cuda:
                room = min(_COMING_BYTES, self.budget_bytes)
                room -= sum(each.memory.nbytes for each in self._coming)
                fits = np.cumsum(sizes) <= room
                again[np.flatnonzero(again)[~fits]] = False
                sizes = sizes[fits]
            if not again.any():
                return
            kept, where = numbers[again], positions.numpy()[again]
            if memory.is_cuda:
                self._bring(kept, sizes, memory, where)
            else:
                self._put_all(kept, sizes, memory.numpy(), where)
        finally:
            self._lock.release()

    def _bring(
        self, numbers: np.ndarray, sizes: np.ndarray, memory: torch.Tensor, where: np.ndarray
    ) -> None:
        pieces = [
            memory[begin : begin + size]
            for begin, size in zip(where.tolist(), sizes.tolist(), strict=True)
        ]
        there, streams = torch.cat(pieces), streams_of(memory.device)
        if streams is None:
            self._put_all(numbers, sizes, there.cpu().numpy(), np.cumsum(sizes) - sizes)
            return
        # perhaps of another stream, which may use its memory again
        memory.record_stream(streams.current(memory.device))
        here = host_memory(there.numel(), there.device).copy_(there, non_blocking=True)
        self._coming.append(_Coming(numbers, sizes, here, memory, event_behind_now(there.device)))

    def _take_what_came(self) -> None:
        """What has arrived from a GPU. The lock is held."""
        while self._coming and self._coming[0].copied.query():
            coming = self._coming.pop(0)
            begin = np.cumsum(coming.size_bytes) - coming.size_bytes
            self._put_all(coming.numbers, coming.size_bytes, coming.memory.numpy(), begin)

    def _put_all(
        self, numbers: np.ndarray, sizes: np.ndarray, source: np.ndarray, where: np.ndarray
    ) -> None:
        for number, begin, size in zip(
            numbers.tolist(), where.tolist(), sizes.tolist(), strict=True
        ):
            self._put(number, source[begin : begin + size])

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
