"""espnx: inference whose state is larger than memory lives on SSD and is computed on where that is
cheapest.

>>> import espnx                                            # doctest: +SKIP
>>> encoder = espnx.load_encoder("minilm")
>>> espnx.build("my.index", [("a", "text of a"), ("b", "text of b")], encoder)
>>> with espnx.open("my.index", encoder) as index:
...     print(index.search("what a says", k=1).hits)

>>> espnx.enable_kv_cache(model)                                     # doctest: +SKIP
>>> with espnx.KVCache(model.config, storage="/mnt/nvme") as cache:
...     model.generate(**inputs, past_key_values=cache, max_new_tokens=64)

`build`, `open`, `add`, `delete`, `compact` and `detach` are of an index on disk, whose path comes
first, as for ``espnx index``; what is of a KV cache says so in its name. `device` opens what either
of them lies on. What only some need is imported from its own module (`espnx.kv.cache`,
`espnx.storage`, ...).

Importing this package loads neither torch nor anything else heavy: names are resolved when they are
first used.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from . import errors
from ._version import __version__

if TYPE_CHECKING:
    from . import device
    from .encoders import load_encoder, load_sparse_encoder
    from .importers.beir import BeirFolder, read_beir
    from .importers.chunks import Chunk, chunk, chunk_documents, chunk_source
    from .importers.corpus import Corpus, read_corpus
    from .importers.trec import read_run, write_run
    from .integrations.streamed.load import load_streamed
    from .integrations.transformers.cache import KVCache
    from .integrations.transformers.enable import enable_kv_cache
    from .integrations.transformers.gguf import load_gguf
    from .integrations.transformers.passages.passage_kv import PassageKV
    from .integrations.transformers.speculation.generate import generate
    from .kv.schedule import Decision
    from .models import demo_model
    from .postings import Postings
    from .rag.answer import Answer, Reference
    from .rag.prompt import Wording
    from .rag.rag import Rag
    from .retrieval.build.api import build, train
    from .retrieval.build.changes.change import add, add_first_stage, compact, delete
    from .retrieval.build.changes.detach import detach
    from .retrieval.build.documents import Document
    from .retrieval.build.reports import AddReport, BuildReport, CompactReport, DetachReport
    from .retrieval.build.trained import Trained
    from .retrieval.encoder import Encoded, Encoder, FunctionEncoder
    from .retrieval.evaluate import (
        Comparison,
        compare_rankings,
        evaluate,
        evaluate_each,
        read_qrels,
    )
    from .retrieval.search.index import Index
    from .retrieval.search.known import KnownCandidates
    from .retrieval.search.read_cost import DeviceCost
    from .retrieval.search.result import Hit, SearchResult, Timings, TokenMatch
    from .retrieval.single_vector import text_vectors
    from .retrieval.sparse_encoder import SparseEncoder, SparseVector, term_vectors
    from .storage import Engine, EngineStats, FileHandle, Future, Plan, open_engine

    open = Index  # noqa: A001 - espnx.open reads as it should, and a package like this is not star-imported

_HOME = {
    "encoders": ["load_encoder", "load_sparse_encoder"],
    "importers.beir": ["BeirFolder", "read_beir"],
    "importers.chunks": ["Chunk", "chunk", "chunk_documents", "chunk_source"],
    "importers.corpus": ["Corpus", "read_corpus"],
    "importers.trec": ["read_run", "write_run"],
    "integrations.streamed.load": ["load_streamed"],
    "integrations.transformers.cache": ["KVCache"],
    "integrations.transformers.enable": ["enable_kv_cache"],
    "integrations.transformers.gguf": ["load_gguf"],
    "integrations.transformers.passages.passage_kv": ["PassageKV"],
    "integrations.transformers.speculation.generate": ["generate"],
    "kv.schedule": ["Decision"],
    "models": ["demo_model"],
    "postings": ["Postings"],
    "rag.answer": ["Answer", "Reference"],
    "rag.prompt": ["Wording"],
    "rag.rag": ["Rag"],
    "retrieval.build.api": ["build", "train"],
    "retrieval.build.changes.change": ["add", "add_first_stage", "compact", "delete"],
    "retrieval.build.changes.detach": ["detach"],
    "retrieval.build.documents": ["Document"],
    "retrieval.build.reports": ["AddReport", "BuildReport", "CompactReport", "DetachReport"],
    "retrieval.build.trained": ["Trained"],
    "retrieval.encoder": ["Encoded", "Encoder", "FunctionEncoder"],
    "retrieval.evaluate": [
        "Comparison",
        "compare_rankings",
        "evaluate",
        "evaluate_each",
        "read_qrels",
    ],
    "retrieval.search.index": ["Index"],
    "retrieval.search.known": ["KnownCandidates"],
    "retrieval.search.read_cost": ["DeviceCost"],
    "retrieval.search.result": ["Hit", "SearchResult", "Timings", "TokenMatch"],
    "retrieval.single_vector": ["text_vectors"],
    "retrieval.sparse_encoder": ["SparseEncoder", "SparseVector", "term_vectors"],
    "storage": ["Engine", "EngineStats", "FileHandle", "Future", "Plan", "open_engine"],
}

__all__ = [
    "AddReport",
    "Answer",
    "BeirFolder",
    "BuildReport",
    "Chunk",
    "CompactReport",
    "Comparison",
    "Corpus",
    "Decision",
    "DetachReport",
    "DeviceCost",
    "Document",
    "Encoded",
    "Encoder",
    "Engine",
    "EngineStats",
    "FileHandle",
    "FunctionEncoder",
    "Future",
    "Hit",
    "Index",
    "KVCache",
    "KnownCandidates",
    "PassageKV",
    "Plan",
    "Postings",
    "Rag",
    "Reference",
    "SearchResult",
    "SparseEncoder",
    "SparseVector",
    "Timings",
    "TokenMatch",
    "Trained",
    "Wording",
    "__version__",
    "add",
    "add_first_stage",
    "build",
    "chunk",
    "chunk_documents",
    "chunk_source",
    "compact",
    "compare_rankings",
    "delete",
    "demo_model",
    "detach",
    "device",
    "enable_kv_cache",
    "errors",
    "evaluate",
    "evaluate_each",
    "generate",
    "load_encoder",
    "load_gguf",
    "load_sparse_encoder",
    "load_streamed",
    "open",
    "open_engine",
    "read_beir",
    "read_corpus",
    "read_qrels",
    "read_run",
    "term_vectors",
    "text_vectors",
    "train",
    "write_run",
]

if os.environ.get("ESPNX_LOG"):
    from .log import from_environment

    from_environment()

if not TYPE_CHECKING:  # a type checker that saw it would take any misspelt name for one

    def __getattr__(name: str) -> object:
        import importlib

        if name == "device":
            return importlib.import_module("espnx.device")
        known = "Index" if name == "open" else name
        for module, names in _HOME.items():
            if known in names:
                return getattr(importlib.import_module(f"espnx.{module}"), known)
        raise AttributeError(f"module 'espnx' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
