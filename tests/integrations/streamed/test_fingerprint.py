"""Whose K and V a kept cache holds, where the model's weights stay in their files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from espnx import errors
from espnx.integrations.streamed.load import load_streamed
from espnx.integrations.transformers.cache import KVCache
from espnx.integrations.transformers.enable import enable_kv_cache
from espnx.integrations.transformers.identity.fingerprint import fingerprint
from espnx.weights import sums
from espnx.weights.safetensors_files import find_tensors
from espnx.weights.stream import WeightFiles
from tests.integrations.streamed.models import CONFIGS, GREEDY, IDS, least


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that checksums have read of files; nothing is known at first, and a file counts as
    settled as soon as it is written."""
    seen, windows = list[int](), WeightFiles.windows

    def counted(self: WeightFiles, source: Any) -> Iterator[tuple[int, torch.Tensor]]:
        seen.append(source.size_bytes)
        return windows(self, source)

    monkeypatch.setattr(sums, "_known", {})
    monkeypatch.setattr(sums, "_SETTLED_NS", -(1 << 62))
    monkeypatch.setattr(WeightFiles, "windows", counted)
    return seen


def sums_of(
    folder: Path, memory: int | str, kind: str = "whole", dtype: torch.dtype | None = None
) -> dict[str, Any]:
    model = load_streamed(folder, memory, dtype=dtype)
    try:
        return fingerprint(model, kind)
    finally:
        model.espnx_weights.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["whole", "sampled"])
@pytest.mark.parametrize("name", CONFIGS)
def test_streamed_or_in_memory(name: str, kind: str, folders: Any) -> None:
    """Also of experts that are put together, of weights in many files, and of those that are
    converted."""
    for dtype in (None, torch.bfloat16):
        wanted = fingerprint(
            AutoModelForCausalLM.from_pretrained(folders[name], dtype=dtype or "auto"), kind
        )
        for folder in (folders[name], folders[f"{name}-sharded"]):
            for memory in (least(folder, dtype=dtype), "1GiB"):
                assert sums_of(folder, memory, kind, dtype) == wanted


def test_samples_of_a_large_weight(tmp_path: Path) -> None:
    """Of which they are a small part."""
    config = CONFIGS["llama"].__class__(
        **CONFIGS["llama"].to_dict() | {"intermediate_size": 64 * 67, "num_hidden_layers": 3}
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float16).save_pretrained(tmp_path)
    wanted = fingerprint(AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto"), "sampled")
    assert sums_of(tmp_path, least(tmp_path), "sampled") == wanted


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(1)
        file.seek(at)
        file.write(bytes([old[0] ^ 1]))


def test_every_byte_counts(folders: Any, tmp_path: Path, reads: list[int]) -> None:
    """One bit of a streamed tensor, its first byte and its last, in a copy and in the very file;
    times that were set back hide nothing."""
    name = "model.layers.2.mlp.down_proj.weight"
    tensor = find_tensors(folders["llama"])[name]
    smallest = least(folders["llama"])
    before = sums_of(folders["llama"], smallest)
    for at in (tensor.offset_bytes, tensor.offset_bytes + tensor.size_bytes - 1):
        copy = tmp_path / str(at)
        shutil.copytree(folders["llama"], copy)
        assert sums_of(copy, smallest) == before
        file = copy / Path(tensor.path).name
        times = file.stat()
        flip(file, at)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        after = sums_of(copy, smallest)
        assert [
            each for each, value in after["weights"].items() if value != before["weights"][each]
        ] == [name]
        flip(file, at)
        assert sums_of(copy, smallest) == before


def test_what_is_unchanged_is_read_once(
    folders: Any, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    smallest = least(folders["llama"])
    first = sums_of(folders["llama"], smallest)
    streamed = sum(reads)
    assert streamed > 0
    assert sums_of(folders["llama"], smallest) == first
    assert sum(reads) == streamed
    monkeypatch.setattr(sums, "_known", {})
    # a file that was just written may change without another time stamp
    monkeypatch.setattr(sums, "_SETTLED_NS", 1 << 62)
    sums_of(folders["llama"], smallest)
    sums_of(folders["llama"], smallest)
    assert sum(reads) == 3 * streamed


def test_a_file_that_was_replaced(folders: Any, tmp_path: Path, reads: list[int]) -> None:
    """The model continues with the file that it opened, and so does its fingerprint; who opens the
    name next has the other."""
    folder = tmp_path / "model"
    shutil.copytree(folders["llama"], folder)
    tensor = find_tensors(folder)["model.layers.2.mlp.down_proj.weight"]
    model = load_streamed(folder, least(folder))
    with torch.no_grad():
        model(IDS)
    before = fingerprint(model)
    other = tmp_path / "other"
    shutil.copy(tensor.path, other)
    flip(other, tensor.offset_bytes)
    other.replace(tensor.path)
    assert fingerprint(model) == before
    model.espnx_weights.close()
    assert sums_of(folder, least(folder)) != before


def test_a_cache_of_a_streamed_model(folders: Any, tmp_path: Path) -> None:
    """Continued with more memory; refused, by name, once a byte of what is streamed has changed."""
    folder = tmp_path / "model"
    shutil.copytree(folders["llama"], folder)
    tensor = find_tensors(folder)["model.layers.2.mlp.down_proj.weight"]
    for memory in (least(folder), "1GiB"):
        model = enable_kv_cache(load_streamed(folder, memory))
        with KVCache(model.config, tmp_path / "kv", name="one") as cache:
            model.generate(
                IDS, past_key_values=cache, attention_mask=torch.ones_like(IDS), **GREEDY
            )
            cache.reuse_prefix(IDS)
        model.espnx_weights.close()
    flip(Path(tensor.path), tensor.offset_bytes)
    model = enable_kv_cache(load_streamed(folder, least(folder)))
    with (
        KVCache(model.config, tmp_path / "kv", name="one") as cache,
        pytest.raises(errors.ForeignFileError, match=r"layers\.2\.mlp\.down_proj"),
    ):
        model.generate(IDS, past_key_values=cache, attention_mask=torch.ones_like(IDS), **GREEDY)
    model.espnx_weights.close()


def test_weights_that_are_nowhere() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    with pytest.raises(errors.InvalidInputError, match="without bytes"):
        fingerprint(model)
