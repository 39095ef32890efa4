"""Kept caches, their state files, weights: what is mutated, and what is done with it (see tests/mutations.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from espnx.integrations.streamed import load_streamed
from espnx.integrations.transformers import KVCache
from espnx.kv.library import entries, remove, verify
from espnx.storage.stream import crc32c
from tests.integrations.kv_models import enabled, generate, make, prompt
from tests.mutations import Trial, join_safetensors, mutated, read_manifest, split_safetensors, write_manifest

_NEW = 3
_PROMPT = prompt([21, 20])


def make_cache(path: Path, x_rows: int = 1) -> None:
    with KVCache(enabled("llama").config, [path / "a", path / "b"], name="c", x_rows=x_rows, spill_interval=8) as cache:
        generate(enabled("llama"), _PROMPT, cache, max_new_tokens=_NEW)


def use_cache(path: Path) -> Any:
    """Lists, verifies, goes on, saves, removes."""
    torch.set_num_threads(1)
    storage = [path / "a", path / "b"]
    found = [(entry.name, entry.model == "damaged") for entry in entries(storage)]
    try:
        seen = verify(storage, "c")
        with KVCache(enabled("llama").config, storage, name="c") as cache:
            held = cache.get_seq_length()
            ids = cache.tokens
            tokens = generate(enabled("llama"), _PROMPT, None, max_new_tokens=_NEW + 2)
            inputs = {"input_ids": tokens[:, : held + 1], "attention_mask": torch.ones(2, held + 1, dtype=torch.long)}
            inputs["attention_mask"][:, : _PROMPT["attention_mask"].shape[1]] = _PROMPT["attention_mask"]
            got = generate(enabled("llama"), inputs, cache, max_new_tokens=1)
        return found, seen, None if ids is None else ids.tolist(), got.tolist()
    finally:
        if found:
            remove(storage, "c")


def cache_manifests(sound: Path) -> Iterator[tuple[str, Callable[[Path], None]]]:
    fields = read_manifest(sound / "a" / "c" / "MANIFEST.json")
    for what, changed in mutated(fields):
        if what.startswith("fingerprint."):
            continue
        yield what, lambda path, changed=changed: write_manifest(path / "a" / "c" / "MANIFEST.json", changed)  # type: ignore[misc]


def _with_state(path: Path, data: bytes) -> None:
    """Another state file, which the manifest names and knows the checksum of."""
    manifest = path / "a" / "c" / "MANIFEST.json"
    fields = read_manifest(manifest)
    (path / "a" / "c" / fields["state"]["file"]).write_bytes(data)
    fields["state"] |= {"size_bytes": len(data), "crc32c": crc32c(data)}
    write_manifest(manifest, fields)


def cache_states(sound: Path) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Headers, and every number of the tables."""
    data = next((sound / "a" / "c").glob("state-*")).read_bytes()
    header, body = split_safetensors(data)
    for what, changed in mutated(header):
        yield f"header {what}", lambda path, changed=changed: _with_state(path, join_safetensors(changed, body))  # type: ignore[misc]
    for name, tensor in header.items():
        if name.endswith((".runs", ".segments")):
            begin, end = tensor["data_offsets"]
            table = np.frombuffer(body[begin:end], dtype="<i8")
            for at in range(len(table)):
                for value in (0, 1, -1, int(table[at]) + 1, int(table[at]) - 1, 4096, 2**31, 2**62, 2**63 - 1, -(2**63)):
                    new = table.copy()
                    new[at] = value
                    if value != table[at]:
                        other = body[:begin] + new.tobytes() + body[end:]
                        yield f"{name}[{at}] = {value}", lambda path, other=other: _with_state(path, join_safetensors(header, other))  # type: ignore[misc]


def make_weights(path: Path) -> None:
    make("llama").save_pretrained(path / "m", max_shard_size="100KB")


def use_weights(path: Path) -> Any:
    torch.set_num_threads(1)
    model = load_streamed(path / "m", "64MiB")
    with torch.no_grad():
        return model(input_ids=torch.tensor([[3, 5, 7]])).logits.double().sum().item()


def weight_headers(sound: Path) -> Iterator[tuple[str, Callable[[Path], None]]]:
    import json

    index = json.loads((sound / "m" / "model.safetensors.index.json").read_text())
    for what, changed in mutated({"weight_map": index["weight_map"]}):
        text = json.dumps(changed)
        yield f"index {what}", lambda path, text=text: (path / "m" / "model.safetensors.index.json").write_text(text)  # type: ignore[misc]
    shard = sorted((sound / "m").glob("*.safetensors"))[0]
    header, body = split_safetensors(shard.read_bytes())
    header = {name: value for name, value in header.items() if name != "__metadata__"}
    for what, changed in mutated(header):
        data = join_safetensors(changed, body)
        yield f"header {what}", lambda path, data=data: (path / "m" / shard.name).write_bytes(data)  # type: ignore[misc]


CACHES = {
    "cache manifests": Trial(make_cache, cache_manifests, use_cache),
    "cache states": Trial(make_cache, cache_states, use_cache),
    "weights": Trial(make_weights, weight_headers, use_weights),
}
