"""Several devices as one: head h of sequence s lies on device (s x heads + h) mod devices, so that all of them work on every layer."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack

import torch

from .. import errors
from ..device.interface import Queries, Segment, Tail, Use
from ..device.layout import RowLayout
from ..device.store import RowStore
from ..ops.attention import merge

Storage = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def directories_of(storage: Storage) -> list[str]:
    """One for each device. Raises InvalidInputError."""
    try:
        found = [os.fspath(each) for each in ([storage] if isinstance(storage, (str, os.PathLike)) else storage)]
    except TypeError as error:
        raise errors.InvalidInputError("storage", got=repr(storage), expected="a directory, or several") from error
    if not found or not all(found):
        raise errors.InvalidInputError("storage", got=repr(storage), expected="a directory, or several")
    return found


class Spread:
    """Devices that share the rows of a cache.

    Attributes:
        devices: at least one.
    """

    def __init__(self, devices: Sequence[RowStore]):
        self.devices = list(devices)
        self._pool = ThreadPoolExecutor(len(self.devices), "espnx-device") if len(self.devices) > 1 else None

    def put(self, layout: RowLayout, k: torch.Tensor, v: torch.Tensor | None, first_sequence: int = 0) -> list[list[tuple[int, Segment]]]:
        """Starts writing k [sequences, heads, n, d] and v, of sequences from `first_sequence` on. For each its segments and their devices.

        Raises what a device's put raises; nothing is kept then.
        """
        n_sequences, n_heads = k.shape[:2]
        found: list[list[tuple[int, Segment]]] = [[] for _ in range(n_sequences)]
        try:
            for device, heads, sequences in self._shares(first_sequence, n_sequences, n_heads):
                mine = slice(sequences.start, None, sequences.step), slice(heads.start, None, heads.step)
                segments = self.devices[device].put(layout, k[mine], None if v is None else v[mine], heads)
                for sequence, segment in zip(sequences, segments, strict=True):
                    found[sequence].append((device, segment))
        except BaseException:
            for parts in found:
                for device, segment in parts:
                    self.devices[device].release(segment)
            raise
        return found

    def memory(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """For rows that wait, uninitialised: on the host, an engine's own."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        return self.devices[0].engine.memory(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def _shares(self, first_sequence: int, n_sequences: int, n_heads: int) -> list[tuple[int, range, range]]:
        """(device, heads, sequences, from 0 on) that are put together."""
        count = len(self.devices)
        period = count // math.gcd(count, n_heads)  # after which sequences lie alike
        found = []
        for sequence in range(min(period, n_sequences)):
            for device in range(count):
                first = (device - (first_sequence + sequence) * n_heads) % count
                if first < n_heads:
                    found.append((device, range(first, n_heads, count), range(sequence, n_sequences, period)))
        return found

    def is_written(self, device: int, segment: Segment) -> bool:
        return self.devices[device].is_written(segment)

    def ahead(self, layout: RowLayout, uses: list[list[Use]]) -> list[int]:
        """A ticket of each device."""
        return [device.ahead(layout, part) for device, part in zip(self.devices, uses, strict=True)]

    def attend(self, tickets: list[int], queries: Queries, tail: Tail | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Each device over its own rows, at the same time; merged by log-sum-exp."""
        if self._pool is None:
            return self.devices[0].attend(tickets[0], queries, tail)
        stream = torch.cuda.current_stream(queries.q.device) if queries.q.is_cuda else None
        jobs = [
            self._pool.submit(_attend_on, stream, device, ticket, queries, tail if i == 0 else None)
            for i, (device, ticket) in enumerate(zip(self.devices, tickets, strict=True))
        ]
        try:
            wait(jobs)  # also where one has failed: nobody may still be at work when the caller goes on
        except BaseException:  # Ctrl-C
            self.forget()  # wakes whoever waits for a read
            wait(jobs)
            raise
        parts = [job.result() for job in jobs]
        o, lse = parts[0]
        for other_o, other_lse in parts[1:]:
            o, lse = merge(o, lse, other_o, other_lse)
        return o, lse

    def attend_memory(self, queries: Queries, tail: Tail | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Over rows in memory alone."""
        return self.devices[0].attend(-1, queries, tail)

    def visit(self, tickets: list[int], see: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """Shows the rows of each device, one device after the other; their reads run at the same time all the same."""
        for device, ticket in zip(self.devices, tickets, strict=True):
            device.visit(ticket, see)

    def are_next(self, tickets: list[int]) -> bool:
        return all(device.front() == ticket for device, ticket in zip(self.devices, tickets, strict=True))

    def forget(self) -> None:
        for device in self.devices:
            device.forget()

    def flush(self) -> None:
        for device in self.devices:
            device.flush()

    def close(self) -> None:
        with ExitStack() as stack:
            for device in self.devices:
                stack.callback(device.close)
            if self._pool is not None:
                self._pool.shutdown()


def _attend_on(
    stream: torch.cuda.Stream | None, device: RowStore, ticket: int, queries: Queries, tail: Tail | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """In a thread of the pool, whose current CUDA stream is not the caller's."""
    with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
        return device.attend(ticket, queries, tail)
