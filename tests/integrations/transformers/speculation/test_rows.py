"""What passes with drafts do to the rows: each block is read once, rejected tokens are never
written, faults leave the cache as it was before the pass."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from espnx import errors
from espnx.integrations.transformers.cache import KVCache
from espnx.storage import FaultRule, FaultyEngine
from tests.integrations.transformers.speculation.drafts import drafting, one_by_one, speculated
from tests.integrations.transformers.tiny import enabled, generate, prompt
from tests.sweeps import in_steps

PADDED = [37, 20, 5]


def test_a_pass_reads_each_block_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = prompt([64])
    wanted = one_by_one("llama", inputs, max_new_tokens=10)
    drafting(monkeypatch, wanted, right=1.0)
    read = {}
    for gamma in (0, 8):
        with KVCache(enabled("llama").config, folder, draft="lookup", spill_interval=64) as cache:
            got = speculated("llama", inputs, cache, max_new_tokens=10, gamma=gamma)
            assert torch.equal(got, wanted)
            said = cache.stats()
            read[gamma] = said["bytes_asked"]
            assert said["speculation"]["passes"] == (9 if gamma == 0 else 1)
            assert said["decode_tokens"] == 9
    assert read[0] == 9 * read[8] > 0


def test_what_is_rejected_is_not_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bytes as one by one, whatever was proposed; and what is on the disk is what stands,
    which the next pass reads."""
    inputs = prompt([37])
    wanted = one_by_one("llama", inputs, max_new_tokens=60)
    config, written = enabled("llama").config, list[int]()
    for right in (None, 1.0, 0.5, 0.0):
        with KVCache(config, folder, draft="lookup", spill_interval=8) as cache:
            if right is None:
                generate(enabled("llama"), inputs, cache, max_new_tokens=60)
            else:
                drafting(monkeypatch, wanted, right)
                got = speculated("llama", inputs, cache, max_new_tokens=60)
                assert torch.equal(got, wanted)
            rows = cache.store.rows.kv[0]
            assert rows is not None
            assert rows.stored <= rows.count == 96
            # a block that one of the last tokens filled may still wait
            written.append(cache.stats()["bytes_written"])
    block = written[0] // (96 // 8)
    assert all(written[0] - 2 * block <= each <= written[0] for each in written[1:])


def test_a_lead_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence whose drafts are always right waits for one whose drafts never are: what waits in
    memory does not grow with the text."""
    from espnx.integrations.transformers.speculation import decoding

    monkeypatch.setattr(decoding, "_LEAD_TOKENS", 16)
    inputs = prompt([20, 20])
    wanted = one_by_one("llama", inputs, max_new_tokens=90)
    drafting(monkeypatch, wanted, right=1.0)
    known, first = decoding.continuation, wanted[0].tolist()
    leads = list[int]()

    def one_sided(tokens: Any, n: int) -> list[int]:
        assert cache.store.proposal is not None
        ends = cache.store.proposal.ends
        leads.append(max(ends) - min(ends))
        return known(tokens, n) if first[: len(tokens)] == tokens.tolist() else []

    monkeypatch.setattr(decoding, "continuation", one_sided)
    with KVCache(enabled("llama").config, folder, draft="lookup", spill_interval=8) as cache:
        assert torch.equal(speculated("llama", inputs, cache, max_new_tokens=90), wanted)
    assert 16 <= max(leads) <= 16 + 8


@pytest.mark.sampled(1)
@in_steps(3)
@pytest.mark.parametrize("x_rows", [0, 2])
@pytest.mark.parametrize(
    ("fault", "operation", "value"),
    [("error", "read", errno.EIO), ("flip", "read", 801), ("error", "write", errno.ENOSPC)],
)
def test_every_call_fails_once(
    folder: Path,
    x_rows: int,
    fault: str,
    operation: str,
    value: int,
    step: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error brings the tokens so far, none of them a draft's; the same cache goes on to the
    same end."""
    inputs = prompt(PADDED)
    wanted = one_by_one("opt", inputs, max_new_tokens=40)
    failures = 0
    for nth in range(1, 120, 7 * step) if operation == "read" else range(1, 30, 2 * step):
        made = list[FaultyEngine]()

        def make_engine(nth: int = nth, made: list[FaultyEngine] = made) -> FaultyEngine:
            rule = FaultRule(fault, operation=operation, nth=nth, count=1, value=value)
            made.append(FaultyEngine(() if made else [rule], poison=True, pool_bytes=1 << 20))
            return made[-1]

        drafting(monkeypatch, wanted, right=0.7, seed=nth)
        options: dict[str, Any] = {"engine": make_engine, "x_rows": x_rows, "spill_interval": 8}
        with KVCache(enabled("opt").config, folder, draft="lookup", **options) as cache:
            said = inputs
            for _ in range(4):
                left = wanted.shape[1] - said["input_ids"].shape[1]
                try:
                    got = speculated("opt", said, cache, max_new_tokens=left)
                    break
                except errors.StorageError as error:
                    failures += 1
                    so_far = error.sequences  # type: ignore[attr-defined]
                    shortest = min(map(_length, so_far))
                    assert torch.equal(so_far[:, :shortest], wanted[:, :shortest])
                    assert cache.store.proposal is None
                    new = torch.ones(len(so_far), shortest - 37, dtype=torch.int64)
                    mask = torch.cat([inputs["attention_mask"], new], dim=1)
                    said = {"input_ids": so_far[:, :shortest], "attention_mask": mask}
                    if cache.get_seq_length():
                        cache.reuse_prefix(**said)
            else:
                pytest.fail("it never came to an end")
        made[0].close()
        assert torch.equal(got, wanted), f"{fault} in the {nth}th {operation}"
    assert failures > 1


def _length(row: torch.Tensor) -> int:
    """Of a text before the padding on its right."""
    return int((row != 0).nonzero().max()) + 1
