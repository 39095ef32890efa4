"""Streams and events of accelerators, behind one door: what orders the work of a GPU, the copies to
and from it and the use of its memory again.

Kernels are launched by torch's own ops, on the current stream. `Streams` is torch.cuda for CUDA
devices; tests register one for a device that does its work late on purpose, in any order that
streams and events allow.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether everything before it has run."""

    def synchronize(self) -> None:
        """Waits until it has."""


class Stream(Protocol):
    """Work that runs in the order in which it was queued; `torch.cuda.Stream` is one."""

    @property
    def device(self) -> torch.device: ...

    def record_event(self) -> Event: ...

    def wait_event(self, event: Any) -> None:
        """What is queued from here on runs after the event."""

    def wait_stream(self, stream: Any) -> None:
        """What is queued from here on runs after what is in the other stream now."""


class Streams(Protocol):
    """What a type of accelerator can do."""

    def is_available(self) -> bool: ...

    def current_index(self) -> int:
        """The number of the thread's current device."""

    def current(self, device: torch.device) -> Stream:
        """The calling thread's current stream."""

    def new(self, device: torch.device) -> Stream: ...

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Makes a stream the calling thread's current one."""

    def event_behind(self, stream: Any) -> Event:
        """An event behind what is queued now, whose `synchronize` leaves the processor to
        others."""

    def is_capturing(self, stream: Any) -> bool:
        """Whether a graph is recorded of what is queued on the stream."""

    def pinned(self, size_bytes: int) -> torch.Tensor:
        """uint8 [bytes] of host memory, uninitialised, that copies reach without the host. What a
        copy still needs is not given to anybody else, also when the last view of it is gone."""

    def free_bytes(self, device: torch.device) -> int:
        """Memory that nobody has taken."""


class CudaStreams:
    """`Streams` of CUDA devices, by torch."""

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def current_index(self) -> int:
        return torch.cuda.current_device()

    def current(self, device: torch.device) -> Stream:
        return torch.cuda.current_stream(device)

    def new(self, device: torch.device) -> Stream:
        return torch.cuda.Stream(device)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def event_behind(self, stream: Any) -> Event:
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event

    def is_capturing(self, stream: Any) -> bool:
        with torch.cuda.stream(stream):
            return torch.cuda.is_current_stream_capturing()

    def pinned(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def free_bytes(self, device: torch.device) -> int:
        return int(torch.cuda.mem_get_info(device)[0])


_OF_TYPE: dict[str, Streams] = {"cuda": CudaStreams()}


def register(device_type: str, streams: Streams) -> None:
    """Makes a type of device known; another one of that name goes."""
    _OF_TYPE[device_type] = streams


def streams_of(device: torch.device) -> Streams | None:
    """What orders the work of a device; None where the caller's thread does it, on the CPU."""
    return _OF_TYPE.get(device.type)


def current_stream(device: torch.device) -> Stream | None:
    """The calling thread's stream on a device, to be handed to `on` in another thread."""
    streams = streams_of(device)
    return None if streams is None else streams.current(device)


def on(stream: Stream | None) -> AbstractContextManager[object]:
    """Queues what follows on a stream; nothing happens for None."""
    if stream is None:
        return nullcontext()
    streams = streams_of(stream.device)
    return nullcontext() if streams is None else streams.on(stream)


def wait_for(device: torch.device) -> None:
    """Waits for what is queued on the calling thread's current stream of a device; on the CPU it is
    done already."""
    streams = streams_of(device)
    if streams is not None:
        streams.event_behind(streams.current(device)).synchronize()


def any_is_capturing(some: Iterable[Any]) -> bool:
    """Whether a graph is recorded on one of the streams."""
    return any(
        (streams := streams_of(stream.device)) is not None and streams.is_capturing(stream)
        for stream in some
    )
