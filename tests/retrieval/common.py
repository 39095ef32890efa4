"""What the retrieval tests share: corpora of known vectors, and what a ranking must equal, computed
from the documents themselves."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load

import espnx
from espnx import errors
from espnx.retrieval.search.index import Index
from espnx.retrieval.search.result import Hit
from espnx.storage import NativeEngine, manifest
from espnx.storage.documents.ids import id_order
from espnx.storage.files import crc32c
from tests.ops.tolerances import gamma

D_CLS, DIM = 16, 8
EVERYTHING = 2**30  # candidates, lists: more than there are


def vectors(
    rng: np.random.Generator, centre: np.ndarray, n_tokens: int, dim: int = DIM
) -> espnx.Encoded:
    """A CLS vector near its centre, and tokens of the length that encoders give."""
    cls = centre + 0.4 * rng.normal(size=len(centre))
    tokens = rng.normal(size=(n_tokens, dim)) / dim**0.5
    return espnx.Encoded(
        torch.from_numpy(cls.astype(np.float32)), torch.from_numpy(tokens.astype(np.float32))
    )


def corpus(
    count: int,
    *,
    d_cls: int = D_CLS,
    dim: int = DIM,
    tokens: tuple[int, int] = (0, 12),
    seed: int = 0,
) -> list[espnx.Document]:
    """Documents from a mixture of eight clusters; token counts between the two given, both
    included."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(1000).normal(size=(8, d_cls))
    return [
        espnx.Document(
            f"doc-{i}",
            f"text of {i}",
            vectors(
                rng, centres[rng.integers(8)], int(rng.integers(tokens[0], tokens[1] + 1)), dim
            ),
        )
        for i in range(count)
    ]


def queries(
    count: int, *, d_cls: int = D_CLS, dim: int = DIM, seed: int = 77
) -> list[espnx.Encoded]:
    return [
        document.vectors
        for document in corpus(count, d_cls=d_cls, dim=dim, tokens=(1, 6), seed=seed)
        if document.vectors
    ]


def build(path: Path | str, documents: Iterable[Any], **options: Any) -> espnx.BuildReport:
    """`espnx.build` with the dimensions of this file and exact lists, unless told otherwise."""
    return espnx.build(
        path, documents, **{"dims": (D_CLS, DIM), "first_stage_code": "flat", "nlist": 4, **options}
    )


def exact_scores(
    documents: Sequence[espnx.Document], query: espnx.Encoded, cls_weight: float, fmt: str
) -> tuple[dict[Any, float], dict[Any, float]]:
    """By id: the score in float64 of the vectors as stored, and how far a float32 computation may
    be off (see tests/ops/tolerances.py)."""
    dtype = {"fp16": torch.float16, "fp32": torch.float32}[fmt]
    if not documents:
        return {}, {}
    q_cls, q_tokens = query.cls.double().numpy(), query.tokens.double().numpy()
    roundings = (
        gamma(q_tokens.shape[1] + len(q_tokens) + 1, 2.0**-24),
        gamma(len(q_cls) + 2, 2.0**-24),
    )
    encoded = [document.vectors for document in documents if document.vectors is not None]
    cls = torch.stack([each.cls for each in encoded]).to(dtype).double().numpy()
    tokens = torch.cat([each.tokens for each in encoded]).to(dtype).double().numpy()
    counts = np.array([len(each.tokens) for each in encoded])
    begins = (np.cumsum(counts) - counts)[counts > 0]

    def best(similar: np.ndarray) -> np.ndarray:
        """Of each document: the sum over query tokens of its largest column, 0 without tokens.
        [documents]"""
        sums = np.zeros(len(documents))
        sums[counts > 0] = (
            np.maximum.reduceat(similar, begins, axis=1).sum(axis=0) if len(begins) else 0.0
        )
        return sums

    scores = best(q_tokens @ tokens.T) + cls_weight * (cls @ q_cls)
    sizes = best(np.abs(q_tokens) @ np.abs(tokens).T)
    bounds = roundings[0] * sizes + roundings[1] * abs(cls_weight) * (np.abs(cls) @ np.abs(q_cls))
    ids = [document.id for document in documents]
    return dict(zip(ids, scores.tolist(), strict=True)), dict(
        zip(ids, bounds.tolist(), strict=True)
    )


def assert_ranking(hits: Sequence[Hit], scores: dict[Any, float], bounds: dict[Any, float]) -> None:
    """`hits` are the best of `scores`, in order, up to swaps within the bounds, each once, with its
    own text and score."""
    ids = [hit.id for hit in hits]
    assert len(set(map(repr, ids))) == len(ids), "a document occurs twice"
    best = sorted(scores.values(), reverse=True)
    slack = 2 * max(bounds.values(), default=0.0)
    for hit, wanted in zip(hits, best, strict=False):
        assert same(hit.score, scores[hit.id], bounds[hit.id]), (
            f"{hit} should score {scores[hit.id]}"
        )
        assert same(scores[hit.id], wanted, slack), f"{hit} is ranked where {wanted} belongs"
    for first, second in itertools.pairwise(hits):
        assert (-first.score, id_order(first.id)) < (-second.score, id_order(second.id))


def same(a: float, b: float, tolerance: float) -> bool:
    return a == b or abs(a - b) <= tolerance


def assert_ranks_as_written(
    index: Index,
    documents: Sequence[espnx.Document],
    *,
    fmt: str = "fp16",
    cls_weight: float = 1.0,
    seed: int = 5,
) -> None:
    """The whole corpus, ranked for two queries, is what the documents' own vectors say."""
    texts = {document.id: document.text for document in documents}
    for query in queries(2, seed=seed):
        result = index.search(
            query, k=EVERYTHING, candidates=EVERYTHING, nprobe=EVERYTHING, cls_weight=cls_weight
        )
        assert len(result.hits) == len(documents)
        assert all(texts[hit.id] == hit.text for hit in result.hits)
        assert_ranking(result.hits, *exact_scores(documents, query, cls_weight, fmt))


def check_store(
    path: Path | str,
    documents: Sequence[espnx.Document],
    *,
    engine: NativeEngine | str = "auto",
    **options: Any,
) -> None:
    """The store opens, verifies, and ranks as its documents say."""
    with espnx.open(path, engine=engine) as index:
        assert index.store.verify() == len(documents)
        assert_ranks_as_written(index, documents, **options)


def leftovers(path: Path | str) -> set[str]:
    """What lies in a store's directory beside the published generation."""
    return {entry.name for entry in Path(path).iterdir()} - {"MANIFEST.json", "LOCK"}


@dataclass(frozen=True)
class SectionPlace:
    """Where a section of a part's file lies."""

    path: Path
    offset_bytes: int
    size_bytes: int


def section_places(path: Path) -> dict[str, SectionPlace]:
    """The sections that a data file names, read here as the written format says."""
    header = path.read_bytes()[:4096]
    count = struct.unpack_from("<I", header, 44)[0]
    found = {}
    for number in range(count):
        name, offset, size, _ = struct.unpack_from("<40sQQQ", header, 72 + 64 * number)
        found[name.rstrip(b"\0").decode()] = SectionPlace(path, offset, size)
    return found


@dataclass(frozen=True)
class RowPlace:
    """The row of a record in a part's file."""

    offset_bytes: int
    data: bytes


def rows_of_part(path: Path) -> list[RowPlace]:
    """In record order, read here as the written format says."""
    whole, places = path.read_bytes(), section_places(path)
    table = places["groups"]
    firsts, offsets = (
        np.frombuffer(whole[table.offset_bytes : table.offset_bytes + table.size_bytes], "<i8")
        .reshape(2, -1)
        .tolist()
    )
    found = []
    for group, offset in enumerate(offsets[:-1]):
        records, at = firsts[group + 1] - firsts[group], places["rows"].offset_bytes + offset
        ends = [0, *struct.unpack_from(f"<{records}I", whole, at)]
        found += [
            RowPlace(at + 4 * records + a, whole[at + 4 * records + a : at + 4 * records + b])
            for a, b in itertools.pairwise(ends)
        ]
    return found


def section_tensors(path: Path, name: str) -> dict[str, np.ndarray]:
    """A section of a part's file that holds tensors."""
    place = section_places(path)[name]
    return dict(load(path.read_bytes()[place.offset_bytes : place.offset_bytes + place.size_bytes]))


def replace_section(store: Path, file: Path, name: str, data: bytes) -> None:
    """Puts other bytes in the place of a section of a part's file; every checksum is made right
    again, the manifest's too."""
    whole, places = file.read_bytes(), section_places(file)
    at = len(whole)
    body = bytearray(whole + data.ljust(-(-len(data) // 4096) * 4096, b"\0"))
    number = list(places).index(name)
    struct.pack_into("<40sQQQ", body, 72 + 64 * number, name.encode(), at, len(data), crc32c(data))
    struct.pack_into("<Q", body, 64, len(body))
    struct.pack_into("<I", body, 4092, crc32c(bytes(body[:4092])))
    file.write_bytes(body)
    inside = str(file.relative_to(store))

    def change(fields: dict[str, Any]) -> None:
        for part in fields["parts"]:
            for each in [
                part,
                *(segment for tier in part["segments"].values() for segment in tier),
            ]:
                each["size_bytes"] = len(body) if each["path"] == inside else each["size_bytes"]

    sign_manifest(store, change)


def sign_manifest(store: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes a manifest and makes its checksum right again."""
    path = store / "MANIFEST.json"
    fields = json.loads(path.read_text())
    del fields["checksum"]
    change(fields)
    path.write_text(json.dumps(fields | {"checksum": manifest._digest(fields)}))


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A directory where a flush costs nothing, for tests that build a hundred stores; an ordinary
    one where there is none."""
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    path = Path(tempfile.mkdtemp(prefix="espnx-test-", dir=base))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def raised(error: BaseException) -> str:
    """A message must name the file: `path` of a storage error is in it."""
    if isinstance(error, errors.StorageError) and error.path is not None:
        assert error.path in str(error)
    return f"{type(error).__name__}: {error}"


def toy_encoder(delay_s: float = 0.0) -> espnx.FunctionEncoder:
    """Words as vectors drawn from their own seed: texts that share words are similar. `delay_s`: of
    every call."""

    @functools.cache
    def word(text: str, size: int) -> np.ndarray:
        return np.random.default_rng(zlib.crc32(text.encode())).normal(size=size) / size**0.5

    def encode(texts: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        time.sleep(delay_s)
        split = [text.lower().split() for text in texts]
        return [
            (
                sum((word(w, D_CLS) for w in words), np.zeros(D_CLS)),
                np.array([word(w, DIM) for w in words]).reshape(-1, DIM),
            )
            for words in split
        ]

    return espnx.FunctionEncoder(encode, "toy@1", d_cls=D_CLS, dim=DIM)
