"""A verb of a package of one's own: `checksum`, of items that are stored. What it is asked, the
plain part that does it, what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from espnx import errors
from espnx.device.command import Command, Part
from espnx.device.cost.work import COMPUTE, Group, Leg, Work, groups_of
from espnx.device.interface import Capabilities, DeviceStats, FilePath
from espnx.device.kinds import PartKind, Verb
from espnx.device.model.spec import Accelerator
from espnx.device.pages import page_reads
from espnx.device.plain import SsdDevice
from espnx.ops.crc32c import crc32c_ranges
from espnx.storage import NativeEngine, Plan
from espnx.storage.parse import Fields
from tests.data.own_verb import checks


@dataclass(frozen=True)
class Items:
    """Attributes: path: of the file; numbers: int64 [n], ascending: which items lie in it, one
    after the other; size_bytes: int64 [n]."""

    path: Path
    numbers: np.ndarray
    size_bytes: np.ndarray

    def places(self, numbers: np.ndarray) -> np.ndarray:
        """Where items are among those of the file. Raises InvalidInputError."""
        found = np.searchsorted(self.numbers, numbers)
        if (found == len(self.numbers)).any() or not np.array_equal(self.numbers[found], numbers):
            raise errors.InvalidInputError(
                "items", got=numbers.tolist(), expected="those that are stored"
            )
        return found

    def offset_bytes(self, places: np.ndarray) -> np.ndarray:
        begin: np.ndarray = np.cumsum(self.size_bytes) - self.size_bytes
        return begin[places]


@dataclass(frozen=True, eq=False)
class ChecksumCommand(Command):
    """The CRC32C of items. Attributes: numbers: of them; deadline_s: of the reads."""

    verb: ClassVar[str] = "checksum"
    result_dtype: ClassVar[Any] = np.uint32
    numbers: Sequence[int] | np.ndarray
    _: KW_ONLY
    deadline_s: float = 30.0

    @property
    def items(self) -> np.ndarray:
        return np.asarray(self.numbers, np.int64)

    def share(self, places: np.ndarray) -> tuple[ChecksumCommand, np.ndarray]:
        return replace(self, numbers=self.items[places]), places

    def begin_line(self, stored: Items, memo: dict[Any, Any]) -> dict[str, Any]:
        return {
            "bytes": int(stored.size_bytes[stored.places(self.items)].sum()),
            "items": self.items.tolist(),
        }

    @classmethod
    def of_line(cls, said: Fields, stored: Items, memo: dict[Any, Any]) -> ChecksumCommand:
        return cls(
            np.array(said.wholes("items", most=int(stored.numbers[-1]), count=1 << 20), np.int64)
        )


class SsdItems(Part):
    """On this machine's SSD and its cores."""

    compute, capabilities = torch.device("cpu"), Capabilities()

    def __init__(self, items: Items, *, engine: Any = "auto"):
        self.items, self._owns = items, isinstance(engine, str)
        self.engine = NativeEngine(engine) if isinstance(engine, str) else engine
        self._file, self._tickets = self.engine.open(str(items.path)), list[ChecksumTicket]()

    def checksum(
        self, numbers: Sequence[int] | np.ndarray, *, deadline_s: float = 30.0
    ) -> ChecksumTicket:
        places = self.items.places(np.asarray(numbers, np.int64))
        plan = Plan.of(
            self._file,
            self.items.offset_bytes(places).tolist(),
            self.items.size_bytes[places].tolist(),
        )
        self._tickets.append(
            ChecksumTicket(
                self.engine.read(plan, deadline_s=deadline_s), self.items.size_bytes[places]
            )
        )
        return self._tickets[-1]

    def path_report(self) -> list[FilePath]:
        return [FilePath(self._file.path, self._file.effective)]

    def stats(self) -> DeviceStats:
        return sum((each.stats for each in self._tickets), DeviceStats())

    def forget(self) -> None:
        for each in self._tickets:
            each.cancel()

    def close(self) -> None:
        if self._owns:
            self.engine.close()


class ChecksumTicket:
    def __init__(self, future: Any, size_bytes: np.ndarray):
        self._future, self._sizes, self.sums = (
            future,
            torch.from_numpy(size_bytes),
            np.zeros(len(size_bytes), np.uint32),
        )

    def next(self, at_least: int = 1, timeout_s: float | None = None) -> tuple[np.ndarray, bool]:
        items, finished = self._future.next(at_least, timeout_s)
        self.sums[items.numpy()] = crc32c_ranges(
            self._future.memory, self._future.position_bytes[items], self._sizes[items]
        ).numpy()
        return items.numpy(), finished

    def reply(self, item: int) -> np.ndarray:
        return self.sums[item : item + 1]

    def finish(self) -> np.ndarray:
        while not self.next(2**62)[1]:
            pass
        return self.sums

    def cancel(self) -> None:
        self._future.cancel()

    @property
    def stats(self) -> DeviceStats:
        return DeviceStats(
            self._future.bytes_asked,
            self._future.bytes_moved,
            read_requests=self._future.request_count,
        )


def cost(command: ChecksumCommand, items: Items, accelerator: Accelerator | None) -> Work:
    """Numbers to the device, sums back; or the items' pages to the host."""
    places = items.places(command.items)
    reads, moved = page_reads(
        np.zeros(len(places), np.int64), items.offset_bytes(places), items.size_bytes[places]
    )
    legs, groups = list[Leg](), list[Group]()
    for begin, end in groups_of(moved):
        size_bytes, requests = int(moved[begin:end].sum()), int(reads[begin:end].sum())
        if accelerator is None:
            legs.append(Leg("flash_to_host", size_bytes, requests=requests))
        else:
            legs += [
                Leg("host_to_device", 8 * (end - begin)),
                Leg("flash_read", size_bytes, (-1,), requests),
            ]
            legs += [
                Leg(COMPUTE, size_bytes, (-1,)),
                Leg("device_to_host", 4 * (end - begin), (-1,)),
            ]
        groups.append(Group(begin, end, len(legs) - 1))
    return Work(legs, groups)


ITEMS = PartKind(
    "items",
    "stored items",
    "open_items",
    {"checksum": Verb(ChecksumCommand, cost)},
    lambda path, items, **options: SsdItems(items, **options),
    lambda part: part.items,
    says="open_items",
    facts=lambda items: {"items": len(items.numbers)},
    checks=checks.ALL,
)


class ItemDevice(SsdDevice):
    """The SSD, with the verb: `espnx device verify` takes it by its name."""

    kinds = (*SsdDevice.kinds, ITEMS)
