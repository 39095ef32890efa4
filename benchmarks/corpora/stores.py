"""Stores of the benchmark's corpora: built once into a directory, found again by what they are made
of."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import espnx
from espnx.device.record_layout import RecordSchema
from espnx.errors import DiskFullError, InvalidInputError
from espnx.retrieval.encoder import Encoded
from espnx.retrieval.store.store import MAGIC, VERSION
from espnx.storage import NativeEngine
from espnx.storage.manifest import read_manifest

from ..harness.registry import Say
from .mixtures import Corpus, Documents, make_queries

QUERIES = 512
_QUERIES_NAME, _STORE_NAME, _NOTE_NAME = "queries.safetensors", "store", "CORPUS.json"
_MEAN_TOKENS = 70


@dataclass(frozen=True)
class Prepared:
    """A corpus on disk: its store, and queries for it."""

    name: str
    store: Path
    queries: Path
    documents: int


def store_key(corpus: Corpus, options: Mapping[str, Any]) -> str:
    """A directory name that differs wherever corpus, build options or the version of the store's
    format differ."""
    text = json.dumps([corpus.key, VERSION, dict(options)], sort_keys=True)
    return f"{corpus.key}-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


def ensure_store(
    root: Path, name: str, corpus: Corpus, options: Mapping[str, Any], say: Say
) -> Prepared:
    """Builds the store below `root` unless it is there; an interrupted build goes on.

    Raises DiskFullError before it begins where spool and store would not fit, and what
    `espnx.build` raises.
    """
    folder = root / store_key(corpus, options)
    prepared = Prepared(name, folder / _STORE_NAME, folder / _QUERIES_NAME, corpus.count)
    if (prepared.store / "MANIFEST.json").exists() and prepared.queries.exists():
        return prepared
    folder.mkdir(parents=True, exist_ok=True)
    _check_disk(folder, corpus, str(options.get("format", "fp16")))
    say(
        f"building {corpus.key} ({corpus.count:,} documents) below {root}: once, a few minutes for "
        "each million"
    )
    begun = time.perf_counter()
    report = espnx.build(
        prepared.store,
        Documents(corpus),
        dims=(corpus.d_cls, corpus.dim),
        progress=_progress(say),
        **{"memory": "4GiB", **options},
    )
    save_queries(prepared.queries, make_queries(corpus, QUERIES))
    nprobe = report.first_stage["nprobe"]
    (folder / _NOTE_NAME).write_text(
        json.dumps({"corpus": corpus.key, "options": dict(options), "nprobe": nprobe}, indent=1)
    )
    say(
        f"built in {time.perf_counter() - begun:.0f} s: {report.record_bytes / 1e9:.2f} GB of "
        f"records, nprobe {nprobe}"
    )
    return prepared


def found_store(folder: Path) -> Prepared:
    """A folder that an earlier run left (it holds ``store`` and ``queries.safetensors``). Raises
    InvalidInputError."""
    store, queries = folder / _STORE_NAME, folder / _QUERIES_NAME
    if not (store / "MANIFEST.json").exists() or not queries.exists():
        raise InvalidInputError(
            "corpus folder",
            got=str(folder),
            expected=f"one with {_STORE_NAME}/ and {_QUERIES_NAME}",
        )
    with NativeEngine() as engine:
        count = read_manifest(engine, store, MAGIC, VERSION)["records"]["count"]
    return Prepared(folder.name.split("-")[0], store, queries, count)


def _check_disk(folder: Path, corpus: Corpus, fmt: str) -> None:
    """While it is built, a store needs its records twice, and the CLS vectors once more."""
    schema = RecordSchema(fmt, corpus.d_cls, corpus.dim)
    need = corpus.count * (
        2 * (schema.fixed_bytes + _MEAN_TOKENS * schema.row_bytes) + 8 * corpus.d_cls
    )
    free = shutil.disk_usage(folder).free
    if free < need:
        raise DiskFullError(
            "the corpus will not fit while it is built",
            needed_bytes=need,
            free_bytes=free,
            path=str(folder),
        )


def _progress(say: Say, every_s: float = 20.0) -> Any:
    last = time.monotonic()

    def tell(phase: str, done: int, total: int | None) -> None:
        nonlocal last
        if time.monotonic() - last > every_s:
            last = time.monotonic()
            say(f"  {phase}: {done:,}{f' of {total:,}' if total else ''}")

    return tell


def save_queries(path: Path, queries: Sequence[Encoded]) -> None:
    """Queries of equally many tokens."""
    save_file(
        {
            "cls": torch.stack([q.cls for q in queries]),
            "tokens": torch.stack([q.tokens for q in queries]),
        },
        path,
    )


def load_queries(path: Path) -> list[Encoded]:
    tensors = load_file(path)
    return [
        Encoded(cls, tokens) for cls, tokens in zip(tensors["cls"], tensors["tokens"], strict=True)
    ]
