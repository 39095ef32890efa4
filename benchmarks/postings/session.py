"""What a process of this benchmark can be asked to do; see worker.py. One system is open in it."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from espnx.errors import InvalidInputError

from ..machine.memory import rss_bytes
from .corpus import Passages
from .learned_systems import build_learned, open_learned
from .names import LEARNED
from .systems import Asked, build, open_system, packages_of


class Session:
    """`handle` runs one command, a mapping with ``do`` and arguments."""

    def __init__(self) -> None:
        self._system: Asked | None = None
        self._rss_before = 0

    def handle(self, command: dict[str, Any]) -> dict[str, Any]:
        arguments = {key: value for key, value in command.items() if key != "do"}
        known: dict[Any, Callable[..., dict[str, Any]]] = {
            "build": self.build,
            "open": self.open,
            "verify": self.verify,
            "prepare": self.prepare,
            "run": self.run,
        }
        if command.get("do") not in known:
            raise InvalidInputError("command", got=command.get("do"), expected=", ".join(known))
        return known[command["do"]](**arguments)

    def build(self, index: str, folder: str) -> dict[str, Any]:
        if index in LEARNED:
            build_learned(index, Path(folder))
            return {}
        words, lengths = (
            np.load(Path(folder) / f"{name}.npy", mmap_mode="r") for name in ("words", "lengths")
        )
        build(index, Path(folder), Passages(words, lengths))
        return {}

    def open(self, name: str, folder: str, k: int, expected: str) -> dict[str, Any]:
        for package in packages_of(name):
            importlib.import_module(package)
        self._rss_before = rss_bytes()  # what is imported is not the index's
        right = np.load(Path(folder) / f"{expected}.npz")
        queries = json.loads((Path(folder) / "queries.json").read_text())
        made = open_system if isinstance(queries[0], list) else open_learned
        self._system = made(name, Path(folder), queries, k, (right["numbers"], right["scores"]))
        return {
            "requested_path": self._system.requested_path,
            "effective_path": self._system.effective_path,
        }

    @property
    def _opened(self) -> Asked:
        if self._system is None:
            raise InvalidInputError("system", got="none", expected="one that is open")
        return self._system

    def verify(self) -> dict[str, Any]:
        return {"problem": self._opened.verify()}

    def prepare(self, turn: int) -> dict[str, Any]:
        return {"cache": self._opened.prepare(turn)}

    def run(self) -> dict[str, Any]:
        sample = self._opened.run()
        more = {"more_bytes": float(rss_bytes() - self._rss_before)}
        return dataclasses.asdict(dataclasses.replace(sample, metrics={**sample.metrics, **more}))

    def close(self) -> None:
        if self._system is not None:
            self._system.close()
            self._system = None
