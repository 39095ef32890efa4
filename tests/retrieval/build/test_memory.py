"""A build keeps to its memory budget, whatever the corpus: measured by the kernel, in a process of
its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forks import Forks
from tests.retrieval.build.memory_child import DIM
from tests.sweeps import some

ROOM_MIB = 112  # beside what Python, PyTorch and FAISS take; the least that a build accepts is 80
COUNT, MEAN_TOKENS = 3200, 250


@pytest.mark.parametrize("pca", some([None, 64], 2))
def test_a_build_keeps_to_its_budget(tmp_path: Path, processes: Forks, pca: int | None) -> None:
    """Vectors of more than twice the room, some documents a sixth of it each; the peak of resident
    memory stays below the limit."""
    result = tmp_path / "result"
    assert (
        processes.run(
            path=tmp_path,
            result=result,
            room_mib=ROOM_MIB,
            count=COUNT,
            mean_tokens=MEAN_TOKENS,
            pca=pca,
        )
        == 0
    )
    seen = json.loads(result.read_text())
    vectors_bytes = seen["records"] * (DIM // (pca or DIM))
    assert vectors_bytes > 2 * (ROOM_MIB << 20)
    assert seen["peak"] <= seen["budget"], f"{(seen['peak'] - seen['budget']) >> 20} MiB too much"
    assert seen["peak"] > seen["base"]
    assert seen["verified"] == COUNT
