"""What holds for every device that has the verb `checksum`: the sums of plain Python, also when the
storage fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from espnx import errors
from espnx.device.conformance.faults import fault_checks
from espnx.device.conformance.requirement import in_threads, raises, require
from espnx.device.near_storage import NearStorageDevice
from espnx.storage import FaultyEngine
from espnx.storage.files import crc32c


@contextmanager
def _known(device: NearStorageDevice, **options: Any) -> Iterator[tuple[Any, list[int]]]:
    """(a part with 200 items, their sums)."""
    from tests.data.own_verb.stored_items import ITEMS, Items

    rng, path = np.random.default_rng(3), Path(device.path) / "verify.items"
    every = [rng.bytes(int(size)) for size in rng.integers(1, 30_000, 200)]
    path.write_bytes(b"".join(every))
    with closing(
        device.open_part(
            ITEMS, Items(path, np.arange(200), np.array([len(each) for each in every])), **options
        )
    ) as part:
        yield part, [crc32c(each) for each in every]
    os.unlink(path)


def sums_every_item(device: NearStorageDevice) -> None:
    with _known(device) as (part, wanted):
        for some in (list(range(200)), [7, 3, 150], []):
            found = part.checksum(some).finish().tolist()
            require(
                found == [wanted[i] for i in some],
                "checksums",
                got=found,
                expected=[wanted[i] for i in some],
            )


def names_every_item_once(device: NearStorageDevice) -> None:
    with _known(device) as (part, wanted):
        ticket, named, is_all = part.checksum(range(200)), list[int](), False
        while not is_all:
            items, is_all = ticket.next()
            for item in items.tolist():
                require(int(ticket.reply(item)[0]) == wanted[item], f"the checksum of item {item}")
            named += items.tolist()
        require(
            sorted(named) == list(range(200)),
            "items that `next` has named",
            got=len(named),
            expected="each once",
        )


def refuses_what_is_not_there(device: NearStorageDevice) -> None:
    with _known(device) as (part, _), raises(errors.InvalidInputError):
        part.checksum([200]).finish()


def answers_threads_at_once(device: NearStorageDevice) -> None:
    with _known(device) as (part, wanted):
        in_threads(
            lambda seed: require(
                part.checksum([seed, 9]).finish().tolist() == [wanted[seed], wanted[9]], "sums"
            ),
            range(4),
        )


@contextmanager
def _asked(
    device: NearStorageDevice, *, engine: FaultyEngine, deadline_s: float
) -> Iterator[Callable[[], None]]:
    with _known(device, engine=engine) as (part, wanted):
        yield lambda: require(
            part.checksum([5, 6], deadline_s=deadline_s).finish().tolist() == wanted[5:7],
            "checksums after an error",
        )


_CHECKS = (
    sums_every_item,
    names_every_item_once,
    refuses_what_is_not_there,
    answers_threads_at_once,
)
ALL = {check.__name__.replace("_", " "): check for check in _CHECKS} | {
    what: check
    for what, check in fault_checks(_asked).items()
    if what != "bytes that are damaged"  # which a checksum is to tell
}
