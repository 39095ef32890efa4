"""Kept caches, their state files, weights: what is mutated, and what is done with it (see
tests/mutations/trials.py)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from espnx.integrations.streamed.load import load_streamed
from espnx.integrations.transformers.cache import KVCache
from espnx.kv.kept.library import entries, remove, verify
from espnx.storage.files import crc32c
from tests.integrations.transformers.tiny import enabled, generate, make, prompt
from tests.mutations.trials import (
    Trial,
    join_safetensors,
    manifest_bytes,
    mutated,
    put,
    read_manifest,
    split_safetensors,
)

MANIFEST = "a/c/MANIFEST.json"
_NEW = 3
_PROMPT = prompt([21, 20])


def make_cache(path: Path, x_rows: int = 1) -> None:
    with KVCache(
        enabled("llama").config, [path / "a", path / "b"], name="c", x_rows=x_rows, spill_interval=8
    ) as cache:
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
            inputs = {
                "input_ids": tokens[:, : held + 1],
                "attention_mask": torch.ones(2, held + 1, dtype=torch.long),
            }
            inputs["attention_mask"][:, : _PROMPT["attention_mask"].shape[1]] = _PROMPT[
                "attention_mask"
            ]
            got = generate(enabled("llama"), inputs, cache, max_new_tokens=1)
        return found, seen, None if ids is None else ids.tolist(), got.tolist()
    finally:
        if found:
            remove(storage, "c")


def cache_manifests(sound: Path) -> Iterator[tuple[str, Callable[[Path], None]]]:
    for what, changed in mutated(read_manifest(sound / MANIFEST)):
        if not what.startswith("fingerprint."):
            yield what, put(MANIFEST, manifest_bytes(changed))


def cache_layers(sound: Path) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """One field of all layers at once, or of all with one kind of rows, so that they still agree
    with one another."""
    manifest = read_manifest(sound / MANIFEST)
    layers = manifest["layers"]
    for kinds in (("x", "kv"), ("x",), ("kv",)):
        for what, changed in mutated(next(layer for layer in layers if layer["kind"] in kinds)):
            name = what.split(" = ")[0]
            put_in = {name: changed[name]} if name in changed else {}
            same = [
                {key: layer[key] for key in layer if key != name} | put_in
                if layer["kind"] in kinds
                else layer
                for layer in layers
            ]
            yield (
                f"of {' and '.join(kinds)} {what}",
                put(MANIFEST, manifest_bytes(manifest | {"layers": same})),
            )


def _with_state(data: bytes) -> Callable[[Path], None]:
    """Another state file, which the manifest names and knows the checksum of."""

    def change(path: Path) -> None:
        fields = read_manifest(path / MANIFEST)
        (path / "a" / "c" / fields["state"]["file"]).write_bytes(data)
        fields["state"] |= {"size_bytes": len(data), "crc32c": crc32c(data)}
        (path / MANIFEST).write_bytes(manifest_bytes(fields))

    return change


def cache_states(sound: Path) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Headers, and every number of the tables."""
    header, body = split_safetensors(next((sound / "a" / "c").glob("state-*")).read_bytes())
    for what, changed in mutated(header):
        yield f"header {what}", _with_state(join_safetensors(changed, body))
    for name, tensor in header.items():
        if not name.endswith((".runs", ".segments")):
            continue
        begin, end = tensor["data_offsets"]
        table = np.frombuffer(body[begin:end], dtype="<i8")
        for at, old in enumerate(table.tolist()):
            for value in {0, 1, -1, old + 1, old - 1, 4096, 2**31, 2**62, 2**63 - 1, -(2**63)} - {
                old
            }:
                new = table.copy()
                new[at] = value
                yield (
                    f"{name}[{at}] = {value}",
                    _with_state(
                        join_safetensors(header, body[:begin] + new.tobytes() + body[end:])
                    ),
                )


def make_weights(path: Path) -> None:
    make("llama").save_pretrained(path / "m", max_shard_size="100KB")


def use_weights(path: Path) -> Any:
    torch.set_num_threads(1)
    model = load_streamed(path / "m", "64MiB")
    with torch.no_grad():
        return model(input_ids=torch.tensor([[3, 5, 7]])).logits.double().sum().item()


def weight_headers(sound: Path) -> Iterator[tuple[str, Callable[[Path], None]]]:
    index = "m/model.safetensors.index.json"
    for what, changed in mutated(
        {"weight_map": json.loads((sound / index).read_text())["weight_map"]}
    ):
        yield f"index {what}", put(index, json.dumps(changed).encode())
    shard = min((sound / "m").glob("*.safetensors"))
    header, body = split_safetensors(shard.read_bytes())
    for what, changed in mutated(
        {name: value for name, value in header.items() if name != "__metadata__"}
    ):
        yield f"header {what}", put(f"m/{shard.name}", join_safetensors(changed, body))


CACHES = {
    "cache manifests": Trial(make_cache, cache_manifests, use_cache),
    "cache layers": Trial(make_cache, cache_layers, use_cache),
    "cache states": Trial(make_cache, cache_states, use_cache),
    "weights": Trial(make_weights, weight_headers, use_weights),
}
