"""Arguments of wrong types to what `import espnx` offers: a typed error that names the argument,
and nothing is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import espnx
from espnx.importers.convert import import_index
from tests.retrieval.common import toy_encoder

E: Any = espnx  # whose signatures say that these are wrong
DOCUMENTS = [("a", "red")]
CONFIG = LlamaConfig(
    hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=8
)

CALLS: dict[str, Callable[[Path], object]] = {
    "open a number": lambda path: E.open(5),
    "open with an engine that is none": lambda path: E.open(store(path), engine=5),
    "open with a device that is none": lambda path: E.open(store(path), device=5),
    "hot": lambda path: E.open(store(path), hot=1.5),
    "threads": lambda path: E.open(store(path), threads="2"),
    "build nowhere": lambda path: E.build(5, DOCUMENTS, toy_encoder()),
    "build of a number": lambda path: E.build(path / "s", 5, toy_encoder()),
    "build of a path": lambda path: E.build(path / "s", path, toy_encoder()),
    "build with an engine that is none": lambda path: E.build(
        path / "s", DOCUMENTS, toy_encoder(), engine="uring"
    ),
    "build with what is not trained": lambda path: E.build(
        path / "s", DOCUMENTS, toy_encoder(), trained="t"
    ),
    "build with a codebook that is none": lambda path: E.build(
        path / "s", DOCUMENTS, toy_encoder(), codebook=1, format="residual2"
    ),
    "memory": lambda path: E.build(path / "s", DOCUMENTS, toy_encoder(), memory=1.5),
    "progress": lambda path: E.build(path / "s", DOCUMENTS, toy_encoder(), progress=5),
    "train nowhere": lambda path: E.train(5, DOCUMENTS, toy_encoder()),
    "load nothing": lambda path: E.Trained.load(5),
    "add nowhere": lambda path: E.add(5, DOCUMENTS),
    "delete nowhere": lambda path: E.delete(5, ["a"]),
    "delete a number": lambda path: E.delete(store(path), 5),
    "compact nowhere": lambda path: E.compact(5),
    "detach nowhere": lambda path: E.detach(5),
    "detach to a number": lambda path: E.detach(store(path), directories=5),
    "import from nowhere": lambda path: import_index(5, path / "s"),  # type: ignore[arg-type]
    "a cache of a number": lambda path: E.KVCache(5, path),
    "a cache in a number": lambda path: E.KVCache(CONFIG, 5),
    "a cache in numbers": lambda path: E.KVCache(CONFIG, [path, 5]),
    "an engine of a cache": lambda path: E.KVCache(CONFIG, path / "kv", engine=5),
    "a device of a cache": lambda path: E.KVCache(CONFIG, path / "kv", device=5),
    "where a cache computes": lambda path: E.KVCache(CONFIG, path / "kv", compute="abacus"),
    "a name of a cache": lambda path: E.KVCache(CONFIG, path / "kv", name=5),
    "sizes of a cache": lambda path: E.KVCache(CONFIG, path / "kv", read_ahead_bytes=1.5),
    "a library of a cache": lambda path: E.KVCache(CONFIG, path / "kv", name="x", library_bytes=[]),
    "enable a layer": lambda path: E.enable_kv_cache(torch.nn.Linear(2, 2)),
    "stream nothing": lambda path: E.load_streamed(5, "1GiB"),
    "an engine": lambda path: E.open_engine(5),
    "a depth": lambda path: E.open_engine("posix", queue_depth="3"),
    "an encoder": lambda path: E.load_encoder(5),
    "a corpus": lambda path: E.read_corpus(None),
    "judgements": lambda path: E.evaluate(5, {}),
}


def store(path: Path) -> Path:
    espnx.build(path / "store", DOCUMENTS, toy_encoder())
    return path / "store"


@pytest.mark.parametrize("call", CALLS)
def test_wrong_types(tmp_path: Path, call: str) -> None:
    with pytest.raises(espnx.errors.EspnxError) as caught:
        CALLS[call](tmp_path)
    assert isinstance(caught.value, espnx.errors.InvalidInputError)
    assert caught.value.got is not None
    assert caught.value.expected is not None or caught.value.fix is not None
    assert {each.name for each in tmp_path.iterdir()} <= {"store"}
