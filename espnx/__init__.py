"""espnx: inference whose state is larger than memory lives on SSD and is computed on where that is cheapest.

>>> import espnx                                            # doctest: +SKIP
>>> encoder = espnx.load_encoder("minilm")
>>> espnx.build("my.index", [("a", "text of a"), ("b", "text of b")], encoder)
>>> with espnx.open("my.index", encoder) as index:
...     print(index.search("what a says", k=1).hits)

>>> espnx.enable(model)                                     # doctest: +SKIP
>>> with espnx.KVCache(model.config, storage="/mnt/nvme") as cache:
...     model.generate(**inputs, past_key_values=cache, max_new_tokens=64)

Importing this package loads neither torch nor anything else heavy: names are resolved when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import errors
from ._version import __version__

if TYPE_CHECKING:
    from .integrations import load_encoder
    from .integrations.streamed import load_streamed
    from .integrations.transformers import KVCache, enable
    from .retrieval.build import BuildReport, build
    from .retrieval.detaching import DetachReport, detach
    from .retrieval.documents import Document
    from .retrieval.encoder import Encoded, FunctionEncoder
    from .retrieval.evaluate import evaluate
    from .retrieval.mutate import CompactReport, add, compact, delete
    from .retrieval.result import Hit, SearchResult
    from .retrieval.search import Index
    from .storage import open_engine

    open = Index  # noqa: A001 - espnx.open reads as it should; nobody star-imports a package like this

_HOME = {
    "BuildReport": ("retrieval.build", "BuildReport"),
    "CompactReport": ("retrieval.mutate", "CompactReport"),
    "DetachReport": ("retrieval.detaching", "DetachReport"),
    "Document": ("retrieval.documents", "Document"),
    "Encoded": ("retrieval.encoder", "Encoded"),
    "FunctionEncoder": ("retrieval.encoder", "FunctionEncoder"),
    "Hit": ("retrieval.result", "Hit"),
    "Index": ("retrieval.search", "Index"),
    "SearchResult": ("retrieval.result", "SearchResult"),
    "KVCache": ("integrations.transformers", "KVCache"),
    "add": ("retrieval.mutate", "add"),
    "build": ("retrieval.build", "build"),
    "compact": ("retrieval.mutate", "compact"),
    "delete": ("retrieval.mutate", "delete"),
    "detach": ("retrieval.detaching", "detach"),
    "enable": ("integrations.transformers", "enable"),
    "evaluate": ("retrieval.evaluate", "evaluate"),
    "load_encoder": ("integrations", "load_encoder"),
    "load_streamed": ("integrations.streamed", "load_streamed"),
    "open": ("retrieval.search", "Index"),
    "open_engine": ("storage", "open_engine"),
}

__all__ = [
    "BuildReport",
    "CompactReport",
    "DetachReport",
    "Document",
    "Encoded",
    "FunctionEncoder",
    "Hit",
    "Index",
    "KVCache",
    "SearchResult",
    "__version__",
    "add",
    "build",
    "compact",
    "delete",
    "detach",
    "enable",
    "errors",
    "evaluate",
    "load_encoder",
    "load_streamed",
    "open",
    "open_engine",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'espnx' has no attribute {name!r}")
    module, attribute = _HOME[name]
    return getattr(importlib.import_module(f"espnx.{module}"), attribute)


def __dir__() -> list[str]:
    return __all__
