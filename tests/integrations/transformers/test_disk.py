"""Disks that are really full, and processes that are really interrupted or killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from espnx import errors
from espnx.integrations.transformers.cache import KVCache
from tests.forks import Forks
from tests.integrations.transformers.tiny import enabled, expected, generate, prompt
from tests.storage.common import until
from tests.storage.machine import MIB, command, file_system, fill, free_bytes, mounted

LENGTHS = [21, 20, 5]
# of one token of one sequence: K and V, two layers, two heads of 128 values
TOKEN_BYTES = 2 * 2 * 2 * 128 * 4


@pytest.mark.root
def test_no_room_for_the_capacity(tmp_path: Path) -> None:
    """Seen when the first rows come, not in an hour; with more room the same cache begins."""
    with (
        mounted("tmpfs", "espnx", tmp_path / "tmpfs", "size=6m") as where,
        KVCache(enabled("llama").config, where, capacity_tokens=1000) as cache,
    ):
        with pytest.raises(errors.DiskFullError) as caught:
            generate(enabled("llama"), prompt(LENGTHS), cache)
        error = caught.value
        assert error.needed_bytes > error.free_bytes
        assert (
            len(LENGTHS) * 1000 * TOKEN_BYTES
            <= error.needed_bytes
            < 1.1 * len(LENGTHS) * 1000 * TOKEN_BYTES
        )
        assert 5 * MIB < error.free_bytes <= 6 * MIB
        assert error.path is not None
        assert str(where) in error.path
        assert torch.equal(error.sequences, prompt(LENGTHS)["input_ids"])  # type: ignore[attr-defined]
        assert cache.get_seq_length() == 0
        assert free_bytes(where) > 5 * MIB, "what could not be had in full was kept in part"
        command("mount", "-o", "remount,size=40m", where)
        assert torch.equal(
            generate(enabled("llama"), prompt(LENGTHS), cache), expected("llama", LENGTHS)
        )


@pytest.mark.sampled(1)
@pytest.mark.root
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
@pytest.mark.parametrize("room_tokens", [0, 20, 28, 40])
def test_the_disk_is_full_on_the_way(tmp_path: Path, kind: str, room_tokens: int) -> None:
    """Of the prompt, of the first tokens, of later ones. Room made, the same cache goes on to the
    same tokens."""
    model, inputs, total = enabled("llama"), prompt(LENGTHS), max(LENGTHS) + 30
    with file_system(kind, tmp_path, 8 * MIB) as where, KVCache(model.config, where) as cache:
        ballast = fill(where, room_tokens * len(LENGTHS) * TOKEN_BYTES + 8192)
        with pytest.raises(errors.DiskFullError) as caught:
            generate(model, inputs, cache)
        error = caught.value
        so_far = error.sequences  # type: ignore[attr-defined]
        assert error.needed_bytes > error.free_bytes >= 0
        assert error.needed_bytes <= 8 * max(LENGTHS) * len(LENGTHS) * TOKEN_BYTES
        assert torch.equal(so_far, expected("llama", LENGTHS)[:, : so_far.shape[1]])
        assert cache.get_seq_length() == (
            so_far.shape[1] - 1 if so_far.shape[1] > max(LENGTHS) else 0
        )
        assert so_far.shape[1] >= min(room_tokens, max(LENGTHS))
        ballast.unlink()
        if kind == "ext4":
            os.sync()
        mask = torch.cat(
            [
                inputs["attention_mask"],
                torch.ones(3, so_far.shape[1] - max(LENGTHS), dtype=torch.long),
            ],
            dim=1,
        )
        got = generate(
            model,
            {"input_ids": so_far, "attention_mask": mask},
            cache,
            max_new_tokens=total - so_far.shape[1],
        )
        assert torch.equal(got, expected("llama", LENGTHS))


@pytest.mark.parametrize("devices", [1, 2])
def test_ctrl_c_while_the_device_stalls(
    tmp_path: Path, folder: Path, processes: Forks, devices: int
) -> None:
    """Seen at once, though the device's deadline is a minute and a half away; the same cache then
    goes on to the same tokens."""
    stalled, result = tmp_path / "stalled", tmp_path / "result"
    child = processes.start(
        storage=[folder / str(i) for i in range(devices)], stalled=stalled, result=result
    )
    assert until(stalled.exists, 60)
    os.kill(child, signal.SIGINT)
    assert processes.wait(child) == 0
    found = json.loads(result.read_text())
    assert found["equal"]
    assert found["interrupted"]
    assert not [name for _, _, names in os.walk(folder) for name in names]


def test_a_killed_process_leaves_nothing(tmp_path: Path, processes: Forks) -> None:
    child = processes.start(
        storage=[tmp_path / "a"], stalled=tmp_path / "stalled", result=tmp_path / "result"
    )
    assert until((tmp_path / "stalled").exists, 60)
    os.kill(child, signal.SIGKILL)
    assert processes.wait(child) == -signal.SIGKILL
    assert not list((tmp_path / "a").iterdir())
