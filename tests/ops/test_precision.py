"""float32 products of ours are float32 products, whatever the program allows for its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from espnx.ops.attention.running import matrix_attention
from espnx.ops.precision import _settings, whole_float32


@pytest.fixture(autouse=True)
def settings_as_they_were() -> Iterator[None]:
    before = _settings()
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision = before[
        1:
    ]


@pytest.mark.parametrize("allowed", ["highest", "high", "medium"])
def test_products_of_attention(monkeypatch: pytest.MonkeyPatch, allowed: str) -> None:
    torch.set_float32_matmul_precision(allowed)
    before = _settings()
    product, seen = torch.bmm, []

    def watched(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append(
            (torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.fp32_precision)
        )
        return product(a, b)

    monkeypatch.setattr(torch, "bmm", watched)
    matrix_attention(
        torch.ones(1, 2, 8),
        torch.ones(1, 3, 8),
        torch.ones(1, 3, 8),
        torch.ones(1, 1, 3, dtype=torch.bool),
    )
    assert seen == [("highest", "ieee")] * 2
    assert _settings() == before


def test_backends_that_were_set_by_themselves() -> None:
    """torch then has no word for the whole; what was set comes back."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with whole_float32():
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


def test_the_last_of_several_threads_restores_it() -> None:
    torch.set_float32_matmul_precision("high")
    inside, leave = threading.Event(), threading.Event()
    seen: list[Any] = []

    def other() -> None:
        with whole_float32():
            inside.set()
            leave.wait(30)
            seen.append(torch.get_float32_matmul_precision())

    thread = threading.Thread(target=other)
    with whole_float32():
        thread.start()
        inside.wait(30)
    assert torch.get_float32_matmul_precision() == "highest"  # the other thread still computes
    leave.set()
    thread.join()
    assert (seen, torch.get_float32_matmul_precision()) == (["highest"], "high")
