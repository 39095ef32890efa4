"""Some of the mutations of files from elsewhere; ``python -m tests.mutations.trials all`` tries
every one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forks import Forks
from tests.sweeps import in_steps

#: Kind of file: one mutation in so many.
KINDS = {
    "store manifests": 211, "parts": 61, "deleted records": 2, "interrupted builds": 97,
    "spooled builds": 97, "cache manifests": 211, "cache layers": 97, "cache states": 997,
    "weights": 97, "prompts": 17, "results": 17,
}  # fmt: skip


@in_steps(4)
@pytest.mark.parametrize("kind", KINDS)
def test_mutations(folder: Path, open_forks: Callable[[str], Forks], kind: str, step: int) -> None:
    code = open_forks("tests.mutations.trials").run(
        kind=kind, every=step * KINDS[kind], shift=5, folder=folder, report=folder / "report"
    )
    assert code == 0, (folder / "report").read_text()
