"""One point of the retrieval benchmark: what is searched for, under which limits, by which
systems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espnx.errors import InvalidInputError

from ..corpora.stores import Prepared
from ..harness.traces import SUFFIX
from .fleet import System
from .names import BASELINES

STEPS_DEFAULT = ("0", "0.3", "auto")


@dataclass(frozen=True)
class Point:
    """What every system is asked, and under which conditions.

    Attributes:
        prepared: the corpus.
        limit_bytes: memory of each process; None: ample.
        nprobe, candidates, rerank, k: of the searches. rerank None: all candidates.
        batch: queries of a search.
        threads: of the first stage; None for the index's own choice.
        throttle: bytes per second of the disk; None: it runs free.
    """

    prepared: Prepared
    limit_bytes: int | None
    nprobe: int
    candidates: int
    rerank: int | None
    batch: int
    threads: int | None
    k: int = 10
    throttle: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Options of every search."""
        return {
            "k": self.k,
            "candidates": self.candidates,
            "rerank": self.rerank,
            "nprobe": self.nprobe,
        }

    def params(self, show: str) -> dict[str, Any]:
        """Parameters as the rows have them."""
        return {
            "show": show,
            "corpus": self.prepared.name,
            "documents": self.prepared.documents,
            "memory_bytes": self.limit_bytes,
            "nprobe": self.nprobe,
            "candidates": self.candidates,
            "rerank": self.rerank,
            "batch": self.batch,
            "threads": self.threads,
            "throttle_bytes_per_s": self.throttle,
        }

    def __str__(self) -> str:
        memory = "ample memory" if self.limit_bytes is None else f"{self.limit_bytes / 2**30:g} GiB"
        depth = "exact" if self.rerank is None else f"re-rank {self.rerank}"
        batch = f", batches of {self.batch}" if self.batch > 1 else ""
        threads = (
            f", {self.threads} first-stage thread{'s' if self.threads > 1 else ''}"
            if self.threads
            else ""
        )
        rate = f", throttled to {self.throttle / 1e6:g} MB/s" if self.throttle else ""
        return (
            f"{self.prepared.name}, {memory}, nprobe {self.nprobe}, {self.candidates} candidates, "
            f"{depth}{batch}{threads}{rate}"
        )


def espnx_systems(steps: Sequence[str]) -> list[System]:
    """One for each prefetch step: ``no-prefetch`` (0), ``espnx`` (auto: what a user gets),
    ``espnx-30%``, ``espnx-5+10+20%``.

    The chooser learns from every search of its process, so ``auto`` has one of its own.
    """
    systems = []
    for text in steps:
        if text == "auto":
            systems.append(System("espnx", options={"prefetch_step": "auto"}))
            continue
        shares = parse_step(text)
        name = (
            f"espnx-{'+'.join(f'{100 * share:g}' for share in shares)}%"
            if shares != [0.0]
            else "no-prefetch"
        )
        systems.append(System(name, options={"prefetch_step": shares}, process="espnx-fixed"))
    return systems


def recorded_systems(folder: Path | None) -> list[System]:
    """What a user gets, a second time, which writes a trace into `folder`; none without one."""
    name = f"espnx{SUFFIX}"
    return (
        []
        if folder is None
        else [
            System(
                name,
                opening={"record": str(folder / f"{name}.trace")},
                options={"prefetch_step": "auto"},
            )
        ]
    )


def parse_step(text: str) -> list[float]:
    """``0.3``, or ``0.05+0.1+0.2``. Raises InvalidInputError."""
    try:
        shares = [float(word) for word in text.split("+")]
    except ValueError:
        shares = [-1.0]
    if not all(0 <= share <= 1 for share in shares):
        raise InvalidInputError(
            "prefetch step",
            got=repr(text),
            expected="a share from 0 to 1, several as 0.05+0.1+0.2, or auto",
        )
    return shares


def baseline_system(name: str) -> System:
    """``memory``, ``swap``, ``mmap-willneed``, or ``mmap-N`` for N threads that gather. Raises
    InvalidInputError."""
    if name == "memory":
        return System(name, name, is_limited=False)
    if name in ("swap", "mmap-willneed"):
        return System(name, name)
    threads = (
        name.removeprefix("mmap-") if name.startswith("mmap-") else "1" if name == "mmap" else ""
    )
    if not threads.isdigit() or not 1 <= int(threads) <= 64:
        raise InvalidInputError(
            "baseline", got=repr(name), expected=", ".join(BASELINES) + ", no-prefetch"
        )
    return System(f"mmap-{threads}", "mmap", {"gather_threads": int(threads)})


MEMORY = baseline_system("memory")
AUTO = espnx_systems(["auto"])[0]


def cascade_systems(counts: Sequence[int]) -> list[System]:
    """Two cascades for each number of full records: one whose coarse tier lies on SSD, and one
    whose coarse tier lies in RAM."""
    systems = []
    for count in counts:
        for place in ("ssd", "ram"):
            options = {"cascade": count, "prefetch_step": "auto"}
            systems.append(
                System(
                    f"cascade-{place}-{count}",
                    opening={"coarse": place},
                    options=options,
                    is_lossy=True,
                )
            )
    return systems
