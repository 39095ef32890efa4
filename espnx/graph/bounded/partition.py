"""Divides vectors among parts that overlap: each goes to the nearest part that has room, its home,
and to the next one as a guest."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...ops.centroids import distances_to_means

NOBODY = np.iinfo(np.uint32).max
_PRODUCTS = 2 << 20


def divide(
    vectors: np.ndarray, centres: np.ndarray, room: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The parts of some vectors.

    Args:
        vectors: float32 [m, dim]. centres: float32 [k, dim], of the parts.
        room: int64 [k]: vectors that each part can still take; becomes less. In all for two of each
            vector.

    Returns:
        home and guest: uint32 [m]; guest is `NOBODY` where no second part has room.
    """
    at_once = max(1, _PRODUCTS // len(centres))
    home, guest = np.empty(len(vectors), np.uint32), np.full(len(vectors), NOBODY, np.uint32)
    for first in range(0, len(vectors), at_once):
        here = slice(first, first + at_once)
        far = distances_to_means(vectors[here], centres).copy()
        home[here] = take_nearest(far, room)
        if len(centres) > 1:
            far[np.arange(len(far)), home[here]] = np.inf
            guest[here] = take_nearest(far, room)
    return home, guest


def take_nearest(far: np.ndarray, room: np.ndarray) -> np.ndarray:
    """The nearest part with room for each vector, uint32 [m], or `NOBODY`; of those that want its
    last places the first ones get them."""
    chosen = np.full(len(far), NOBODY, np.uint32)
    waiting = np.arange(len(far))
    while True:
        far[:, room == 0] = np.inf
        wanted = far[waiting].argmin(axis=1)
        possible = np.isfinite(far[waiting, wanted])
        waiting, wanted = waiting[possible], wanted[possible]
        if not len(waiting):
            return chosen
        order = np.argsort(wanted, kind="stable")
        of_part = wanted[order]
        place = np.arange(len(order)) - np.searchsorted(of_part, of_part)
        fits = place < room[of_part]
        chosen[waiting[order[fits]]] = of_part[fits]
        room -= np.bincount(of_part[fits], minlength=len(room))
        waiting = np.sort(waiting[order[~fits]])


class PartFiles:
    """Appends vectors to their parts' files: of part p `p.own.rows` (uint32), `p.own.vectors`, and
    `p.guest.rows`, `p.guest.homes`, `p.guest.vectors`."""

    def __init__(self, folder: Path, n_parts: int):
        self._folder = folder
        for part in range(n_parts):
            for name in ("own.rows", "own.vectors", "guest.rows", "guest.homes", "guest.vectors"):
                (folder / f"{part}.{name}").touch()

    def add(self, first: int, stored: np.ndarray, home: np.ndarray, guest: np.ndarray) -> None:
        """Vectors of the input from row `first` on, as they are stored."""
        rows = np.arange(first, first + len(stored), dtype=np.uint32)
        for part, chosen in _by_part(home):
            self._append(f"{part}.own.rows", rows[chosen])
            self._append(f"{part}.own.vectors", stored[chosen])
        for part, chosen in _by_part(guest):
            self._append(f"{part}.guest.rows", rows[chosen])
            self._append(f"{part}.guest.homes", home[chosen])
            self._append(f"{part}.guest.vectors", stored[chosen])

    def _append(self, name: str, values: np.ndarray) -> None:
        with (self._folder / name).open("ab") as file:
            file.write(np.ascontiguousarray(values).view(np.uint8).reshape(-1).data)


def _by_part(parts: np.ndarray) -> list[tuple[int, np.ndarray]]:
    order = np.argsort(parts, kind="stable")
    names, begin = np.unique(parts[order], return_index=True)
    ends = [*begin[1:].tolist(), len(order)]
    return [
        (int(name), order[a:b])
        for name, a, b in zip(names, begin.tolist(), ends, strict=True)
        if name != NOBODY
    ]
