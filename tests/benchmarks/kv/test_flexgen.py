"""FlexGen with its cache on disk chooses the tokens that transformers chooses; skipped where it is
not installed."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from espnx.benchmarks.harness.result import load, rows_of
from espnx.benchmarks.kv.systems.flexgen_disk import Gate
from espnx.errors import EspnxError
from tests.benchmarks.kv.test_case import bench


def test_the_same_tokens_as_transformers(tmp_path: Path) -> None:
    pytest.importorskip("flexgen", reason="FlexGen 0.1.8 is not installed")
    result = tmp_path / "r.json"
    words = [
        "--pairs",
        "3",
        "--context",
        "301",
        "--batch",
        "2",
        "--baseline",
        "dynamic,flexgen-disk",
        "--json",
        str(result),
    ]
    assert bench(tmp_path, *words) == 0
    found = {row.system: row for row in rows_of(load(result))}
    assert found["flexgen-disk"].correct
    assert found["flexgen-disk"].metrics["same_tokens"] > 0.8
    assert found["flexgen-disk"].effective_path == "mmap"
    assert set(found["espnx"].ratio) == {"dynamic", "flexgen-disk"}


def test_a_loop_waits_at_the_gate_for_each_token() -> None:
    gate, passed = Gate(), []

    def loop() -> None:
        for number in range(3):
            gate.start()
            passed.append(number)
            gate.stop()

    thread = threading.Thread(target=loop)
    thread.start()
    gate.wait()
    assert passed == [0]
    gate.go()
    assert passed == [0, 1]
    gate.go()
    assert passed == [0, 1, 2]
    thread.join()


def test_what_fails_behind_the_gate_is_raised() -> None:
    gate = Gate()
    gate.fail(ValueError("no"))
    with pytest.raises(EspnxError, match="no"):
        gate.wait()
