"""The loop of a benchmark's process: which failures are answers, and which end it."""

from __future__ import annotations

import importlib
import io
import json
from typing import Any

import pytest

from espnx.benchmarks.harness import worker
from espnx.errors import InvalidInputError

FAILURES: list[Exception] = [InvalidInputError("no"), OSError("disk"), MemoryError("full")]


class Failing:
    """A session that raises what it is told to."""

    is_closed = False

    def handle(self, command: dict[str, Any]) -> dict[str, Any]:
        raise [*FAILURES, RuntimeError("model"), KeyError("bug")][command["number"]]

    def close(self) -> None:
        Failing.is_closed = True


def answers(name: str, monkeypatch: pytest.MonkeyPatch, *numbers: int) -> list[str]:
    monkeypatch.setattr(
        importlib.import_module(f"espnx.benchmarks.{name}.session"), "Session", Failing
    )
    monkeypatch.setattr(Failing, "is_closed", False)
    out = io.StringIO()
    worker.serve(
        name, io.StringIO("".join(json.dumps({"number": number}) + "\n" for number in numbers)), out
    )
    return [json.loads(line)["error"].split(":")[0] for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("name", worker.SESSIONS)
def test_expected_failures_are_answers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answers(name, monkeypatch, 0, 1, 2) == ["InvalidInputError", "OSError", "MemoryError"]
    assert Failing.is_closed


def test_only_a_models_runtime_error_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answers("kv", monkeypatch, 3, 0) == ["RuntimeError", "InvalidInputError"]
    with pytest.raises(RuntimeError, match="model"):
        answers("retrieval", monkeypatch, 3)


@pytest.mark.parametrize("name", worker.SESSIONS)
def test_a_mistake_ends_the_process_and_closes_the_session(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyError, match="bug"):
        answers(name, monkeypatch, 4)
    assert Failing.is_closed
