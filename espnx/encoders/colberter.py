"""Encoders of ColBERTer's shape (Hofstaetter et al., 2022): one compressed ``[CLS]`` vector for the
first stage, and compressed tokens.

ColBERTer's own checkpoints are pickled modules of its training code, in several variants. What is
read here is a folder that anyone can write from one: a transformer as Hugging Face saves it, and
two files beside it.

``colberter.json``::

    {"d_cls": 128, "dim": 32, "query_length": 32, "document_length": 200,
     "whole_words": true, "normalize": false}

``compressors.safetensors``: ``cls.weight`` [d_cls, hidden], ``token.weight`` [dim, hidden], and if
need be ``cls.bias``, ``token.bias``.

With `whole_words` there is one vector for each distinct word of a text: the mean over all pieces of
all its occurrences (the paper's bag of whole words); without, one for each piece. Special tokens
give none. Vectors are as long as the compressors make them, as the paper's are, unless `normalize`
is true, which residual codes want. Lengths are in positions; longer texts are cut.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, normalize

from ..errors import FormatError, InvalidInputError
from ..retrieval.encoder import Encoded
from .checkpoints import fingerprint, read_object, read_weights, weight_files
from .late_interaction import LateInteractionEncoder, Layout, settings_hash
from .windows import named

CONFIG, COMPRESSORS = "colberter.json", "compressors.safetensors"
DEFAULTS = {"query_length": 32, "document_length": 200, "whole_words": False, "normalize": False}
REQUIRED = ("d_cls", "dim")


def is_colberter(folder: Path) -> bool:
    """Whether a folder has ColBERTer's two files."""
    return (folder / CONFIG).is_file()


class ColBERTerEncoder(LateInteractionEncoder):
    """CLS and token vectors of a model of ColBERTer's shape; see the module for the folder.

    Args:
        folder: a transformer's folder with ``colberter.json`` and ``compressors.safetensors``.
        device, dtype, batch_tokens: see
            :class:`espnx.encoders.late_interaction.LateInteractionEncoder`.

    ``name`` is made from a hash of config, tokenizer, weights and settings.

    Raises:
        InvalidInputError: not such a folder, or settings out of range.
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
    ):
        super().__init__(folder, device=device, dtype=dtype, batch_tokens=batch_tokens)
        self.settings = self._settings()
        self.d_cls, self.dim = self.settings["d_cls"], self.settings["dim"]
        self.query_length = self.check_length("query_length", self.settings["query_length"], 3)
        self.document_length = self.check_length(
            "document_length", self.settings["document_length"], 3
        )
        if not getattr(self._tokenizer, "is_fast", False):
            raise InvalidInputError(
                f"encoder folder {self.folder}",
                got="a slow tokenizer",
                expected="a fast one, which knows words",
            )
        path = self.folder / COMPRESSORS
        self._weights = read_weights(
            [path] if path.is_file() else [],
            ["cls.weight", "cls.bias", "token.weight", "token.bias"],
        )
        for name, rows in (("cls.weight", self.d_cls), ("token.weight", self.dim)):
            got = list(self._weights[name].shape) if name in self._weights else "nothing"
            if got != [rows, self.hidden_size]:
                raise FormatError(name, path=path, got=got, expected=[rows, self.hidden_size])
        self._weights = {
            name: weight.to(self.device, self.dtype) for name, weight in self._weights.items()
        }
        contents = fingerprint(
            self.folder, sorted({*weight_files(self.folder, pickled=True), path})
        )
        self.name = named(
            f"colberter@{settings_hash(contents, sorted(self.settings.items()))}", self.dtype
        )

    def _settings(self) -> dict[str, Any]:
        path = self.folder / CONFIG
        stored = read_object(path)
        unknown = sorted(set(stored) - {*DEFAULTS, *REQUIRED})
        bad = [
            name
            for name in REQUIRED
            if not isinstance(stored.get(name), int)
            or isinstance(stored[name], bool)
            or stored[name] < 1
        ]
        bad += [
            name
            for name in ("whole_words", "normalize")
            if not isinstance(stored.get(name, False), bool)
        ]
        if unknown or bad:
            got = f"unknown {unknown[0]!r}" if unknown else f"{bad[0]} {stored.get(bad[0])!r}"
            raise FormatError(
                "settings",
                path=path,
                got=got,
                expected=f"d_cls and dim, at least 1, and of {sorted(DEFAULTS)} what differs",
            )
        return DEFAULTS | stored

    def lay_out(self, texts: list[str], *, is_query: bool) -> list[Layout]:
        length = self.query_length if is_query else self.document_length
        made = self._tokenizer(texts, truncation=True, max_length=length, verbose=False)
        layouts = []
        for number, ids in enumerate(made["input_ids"]):
            words = made.word_ids(number)
            kept = [word is not None for word in words]
            layouts.append(
                Layout(
                    ids,
                    [True] * len(ids),
                    kept,
                    _distinct(ids, words) if self.settings["whole_words"] else None,
                )
            )
        return layouts

    def project(self, hidden: Tensor) -> Tensor:
        cls = linear(hidden[:, :1], self._weights["cls.weight"], self._weights.get("cls.bias"))
        tokens = linear(hidden, self._weights["token.weight"], self._weights.get("token.bias"))
        return torch.cat([cls.expand(-1, hidden.shape[1], -1), tokens], dim=2).to(torch.float32)

    def finish(self, vectors: Tensor, layout: Layout) -> Encoded:
        cls = vectors[0, : self.d_cls].clone()
        tokens = vectors[torch.tensor(layout.kept, dtype=torch.bool), self.d_cls :]
        if layout.words is not None:
            rows = torch.tensor(layout.words, dtype=torch.int64)
            count = max(layout.words, default=-1) + 1
            sums = torch.zeros(count, self.dim).index_add_(0, rows, tokens)
            tokens = sums / torch.bincount(rows, minlength=count).unsqueeze(1)
        return (
            Encoded(normalize(cls, dim=0), normalize(tokens, dim=1))
            if self.settings["normalize"]
            else Encoded(cls, tokens.contiguous())
        )


def _distinct(ids: list[int], words: list[int | None]) -> list[int]:
    """The number of the distinct word, which is known by its pieces, for each position that belongs
    to a word."""
    pieces: dict[int, tuple[int, ...]] = {}
    inside = [(number, word) for number, word in zip(ids, words, strict=True) if word is not None]
    for number, word in inside:
        pieces[word] = (*pieces.get(word, ()), number)
    numbers: dict[tuple[int, ...], int] = {}
    for spelled in pieces.values():
        numbers.setdefault(spelled, len(numbers))
    return [numbers[pieces[word]] for _, word in inside]
