"""PyLate folders (lightonai/pylate, saved in the form of sentence-transformers) as encoders: a
transformer and one or more dense layers.

What is laid out and kept is what ``pylate.models.ColBERT`` of PyLate 1.6.0 lays out and keeps, so
vectors agree to rounding.
"""

from __future__ import annotations

import os
import string
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import FormatError, InvalidInputError
from .checkpoints import fingerprint, read_json, read_object, weight_files
from .dense_layer import check_chain, dense_files, read_dense
from .late_interaction import LateInteractionEncoder, Layout, insert_after_first, settings_hash
from .windows import named

MODULES, SETTINGS, TRANSFORMER = (
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
)
DEFAULTS: dict[str, Any] = {
    "query_prefix": "[Q] ",
    "document_prefix": "[D] ",
    "query_length": 32,
    "document_length": 180,
    "attend_to_expansion_tokens": False,
    "do_query_expansion": True,
    "skiplist_words": list(string.punctuation),
}


def modules_of(folder: Path) -> list[tuple[str, Path]]:
    """(class name, folder) of the modules that PyLate uses: the transformer and the dense layers.
    Pooling and the like are passed over."""
    listed = read_json(folder / MODULES)
    try:
        found = [(str(item["type"]).rpartition(".")[2], folder / item["path"]) for item in listed]
    except (TypeError, KeyError) as error:
        raise FormatError(
            "list of modules",
            path=folder / MODULES,
            got=repr(error),
            expected="a list with type and path",
        ) from error
    return [(kind, where) for kind, where in found if kind in ("Transformer", "Dense")]


def is_pylate(folder: Path) -> bool:
    """Whether a folder of sentence-transformers' form holds a PyLate model (and not one that gives
    a vector for the whole text)."""
    if not (folder / MODULES).is_file():
        return False
    settings = read_object(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    listed = read_json(folder / MODULES)
    types = (
        [str(item.get("type")) for item in listed if isinstance(item, dict)]
        if isinstance(listed, list)
        else []
    )
    return (
        settings.get("model_type") == "ColBERT"
        or "query_prefix" in settings
        or any(kind.startswith("pylate.") for kind in types)
    )


class PyLateEncoder(LateInteractionEncoder):
    """Token vectors of a PyLate model, L2-normalised, d_cls = 0.

    A query is ``[CLS] prefix words [SEP]``, filled up with ``[MASK]`` to `query_length` positions
    if the model expands queries; every position gives a vector. A document is ``[CLS] prefix words
    [SEP]``, cut at `document_length` positions, and gives a vector for each but the words of the
    skip list. What is longer is cut.

    Args:
        folder: as PyLate saves it.
        device, dtype, batch_tokens: see
            :class:`espnx.encoders.late_interaction.LateInteractionEncoder`.
        query_length, document_length: in place of what the folder says.

    ``name`` is made from a hash of config, tokenizer, weights and settings.

    Raises:
        InvalidInputError: not such a folder, or an argument out of range.
        FormatError: damaged, incomplete or contradictory files.
        MissingDependencyError: transformers is not installed.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        device: str = "cpu",
        dtype: str = "fp32",
        batch_tokens: int = 4096,
        query_length: int | None = None,
        document_length: int | None = None,
    ):
        root = Path(folder)
        modules = modules_of(root)
        if [kind for kind, _ in modules[:1]] != ["Transformer"] or len(modules) < 2:
            got = ", ".join(kind for kind, _ in modules) or "none of them"
            raise FormatError(
                "PyLate folder",
                path=root / MODULES,
                got=got,
                expected="a Transformer and at least one Dense",
                fix="save the model with PyLate, which adds the projection",
            )
        super().__init__(modules[0][1], device=device, dtype=dtype, batch_tokens=batch_tokens)
        self.settings = self._settings(root, query_length, document_length)
        least = 3 + bool(self.settings["query_prefix"] or self.settings["document_prefix"])
        self.query_length = self.check_length("query_length", self.settings["query_length"], least)
        self.document_length = self.check_length(
            "document_length", self.settings["document_length"], least
        )
        self._layers = [read_dense(where, self.device, self.dtype) for _, where in modules[1:]]
        check_chain(self._layers, self.hidden_size, root)
        self.dim = len(self._layers[-1].weight)
        self._query_marker = self._marker("query_prefix")
        self._document_marker = self._marker("document_prefix")
        self._filler = self._filling()
        ids = (
            self._tokenizer.convert_tokens_to_ids(word) for word in self.settings["skiplist_words"]
        )
        self._left_out = {number for number in ids if number is not None}
        weights = [
            *weight_files(self.folder, pickled=True),
            *(path for _, where in modules[1:] for path in dense_files(where)),
        ]
        contents = fingerprint(
            self.folder, weights, *(where / "config.json" for _, where in modules[1:])
        )
        self.name = named(
            f"pylate@{settings_hash(contents, sorted(self.settings.items()))}", self.dtype
        )

    def _settings(
        self, root: Path, query_length: int | None, document_length: int | None
    ) -> dict[str, Any]:
        stored = read_object(root / SETTINGS) if (root / SETTINGS).is_file() else {}
        chosen = {
            key: stored[key] if stored.get(key) is not None else value
            for key, value in DEFAULTS.items()
        }
        given = {"query_length": query_length, "document_length": document_length}
        chosen |= {key: value for key, value in given.items() if value is not None}
        chosen["prompt"] = (stored.get("prompts") or {}).get(
            stored.get("default_prompt_name")
        ) or ""
        own = self.folder / TRANSFORMER
        chosen["do_lower_case"] = bool(own.is_file() and read_object(own).get("do_lower_case"))
        if getattr(self._tokenizer, "padding_side", "right") != "right":
            raise InvalidInputError(
                f"PyLate folder {root}",
                got="a tokenizer that pads on the left",
                expected="one that pads on the right",
            )
        return chosen

    def _marker(self, which: str) -> int | None:
        prefix = self.settings[which]
        return self.token_id(prefix, which) if prefix else None

    def _filling(self) -> int:
        """What fills a query up: [MASK], or the end of sequence of a model that has none."""
        candidates = (
            self._tokenizer.mask_token_id,
            self._tokenizer.eos_token_id,
            self._tokenizer.pad_token_id,
        )
        chosen = next((number for number in candidates if number is not None), None)
        if chosen is None:
            raise FormatError(
                "PyLate folder",
                path=self.folder,
                got="a tokenizer without mask, end or padding",
                expected="one of them",
            )
        return int(chosen)

    def lay_out(self, texts: list[str], *, is_query: bool) -> list[Layout]:
        marker = self._query_marker if is_query else self._document_marker
        length = self.query_length if is_query else self.document_length
        # sentence-transformers strips
        texts = [f"{self.settings['prompt']}{text}".strip() for text in texts]
        if self.settings["do_lower_case"]:
            texts = [text.lower() for text in texts]
        made = self.pieces(texts, length - (marker is not None))
        rows = [ids if marker is None else insert_after_first(ids, marker) for ids in made]
        return [self._query(ids) if is_query else self._document(ids) for ids in rows]

    def _query(self, ids: list[int]) -> Layout:
        filled = self.query_length - len(ids) if self.settings["do_query_expansion"] else 0
        attended = [True] * len(ids) + [bool(self.settings["attend_to_expansion_tokens"])] * filled
        return Layout(ids + [self._filler] * filled, attended, [True] * (len(ids) + filled))

    def _document(self, ids: list[int]) -> Layout:
        return Layout(ids, [True] * len(ids), [number not in self._left_out for number in ids])

    def project(self, hidden: Tensor) -> Tensor:
        for layer in self._layers:
            hidden = layer(hidden)
        return hidden.to(torch.float32)
