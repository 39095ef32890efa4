"""ColBERT checkpoints (stanford-futuredata/ColBERT, v1 and v2) as encoders: a transformer and a
linear head without bias.

What is laid out and kept is what ``colbert.modeling`` of colbert-ai 0.2.22 lays out and keeps, so
vectors agree to rounding.
"""

from __future__ import annotations

import os
import string
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..errors import FormatError, InvalidInputError
from .checkpoints import fingerprint, read_object, read_weights, weight_files
from .late_interaction import LateInteractionEncoder, Layout, insert_after_first, settings_hash
from .windows import named

METADATA = "artifact.metadata"
ARCHITECTURE = "HF_ColBERT"
HEAD = "linear.weight"
# What a checkpoint without metadata was trained with (colbert.infra.config.settings).
DEFAULTS = {
    "query_token_id": "[unused0]",
    "doc_token_id": "[unused1]",
    "query_maxlen": 32,
    "doc_maxlen": 220,
    "attend_to_mask_tokens": False,
    "mask_punctuation": True,
    "interaction": "colbert",
}


def is_colbert(folder: Path) -> bool:
    """Whether a folder holds a ColBERT checkpoint."""
    if (folder / METADATA).is_file():
        return True
    config = folder / "config.json"
    return config.is_file() and ARCHITECTURE in (read_object(config).get("architectures") or [])


class ColBERTEncoder(LateInteractionEncoder):
    """Token vectors of a ColBERT checkpoint, L2-normalised, d_cls = 0.

    A query is ``[CLS] [Q] words [SEP]`` filled up with ``[MASK]`` to `query_maxlen` positions, all
    of which give a vector. A document is ``[CLS] [D] words [SEP]``, cut at `doc_maxlen` positions,
    and gives a vector for each but punctuation. What is longer is cut.

    Args:
        folder: with config.json, the tokenizer, weights (safetensors, or ``pytorch_model.bin``,
            read as tensors alone) and ``artifact.metadata``. Without the last, ColBERT's defaults
            hold.
        device, dtype, batch_tokens: see
            :class:`espnx.encoders.late_interaction.LateInteractionEncoder`.
        query_maxlen, doc_maxlen, attend_to_mask_tokens, mask_punctuation: in place of what the
            checkpoint says.

    ``name`` is made from a hash of config, tokenizer, weights and settings.

    Raises:
        InvalidInputError: not such a folder, an argument out of range, or an interaction other than
            ColBERT's.
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
        query_maxlen: int | None = None,
        doc_maxlen: int | None = None,
        attend_to_mask_tokens: bool | None = None,
        mask_punctuation: bool | None = None,
    ):
        super().__init__(folder, device=device, dtype=dtype, batch_tokens=batch_tokens)
        given = {
            "query_maxlen": query_maxlen,
            "doc_maxlen": doc_maxlen,
            "attend_to_mask_tokens": attend_to_mask_tokens,
            "mask_punctuation": mask_punctuation,
        }
        self.settings = self._settings(given)
        self.query_maxlen = self.check_length("query_maxlen", self.settings["query_maxlen"], 4)
        self.doc_maxlen = self.check_length("doc_maxlen", self.settings["doc_maxlen"], 4)
        weights = weight_files(self.folder, pickled=True)
        self._head = self._read_head(weights)
        self.dim = len(self._head)
        self._query_marker = self.token_id(self.settings["query_token_id"], "marker of queries")
        self._document_marker = self.token_id(self.settings["doc_token_id"], "marker of documents")
        if self._tokenizer.mask_token_id is None or self._tokenizer.pad_token_id is None:
            raise FormatError(
                "ColBERT checkpoint",
                path=self.folder,
                got="a tokenizer without [MASK] or [PAD]",
                expected="both",
            )
        self._left_out = {
            self._tokenizer.pad_token_id,
            *(self._punctuation() if self.settings["mask_punctuation"] else ()),
        }
        settings = settings_hash(fingerprint(self.folder, weights), sorted(self.settings.items()))
        self.name = named(f"colbert@{settings}", self.dtype)

    def _settings(self, given: dict[str, Any]) -> dict[str, Any]:
        path = self.folder / METADATA
        stored = read_object(path) if path.is_file() else {}
        stored = stored.get("config", stored)
        chosen = {
            key: stored[key] if stored.get(key) is not None else value
            for key, value in DEFAULTS.items()
        }
        chosen |= {key: value for key, value in given.items() if value is not None}
        if chosen["interaction"] != "colbert":
            raise InvalidInputError(
                f"ColBERT checkpoint {self.folder}",
                got=f"interaction {chosen['interaction']!r}",
                expected='"colbert" (a sum over all tokens)',
            )
        self._expected_dim = stored.get("dim")
        return chosen

    def _read_head(self, weights: list[Path]) -> Tensor:
        found = read_weights(weights, [HEAD])
        if HEAD not in found:
            raise FormatError(
                "ColBERT checkpoint",
                path=self.folder,
                got=f"no {HEAD} in the weights",
                expected="the linear head",
            )
        head = found[HEAD]
        rows = self._expected_dim if self._expected_dim is not None else "any"
        if (
            head.dim() != 2
            or head.shape[1] != self.hidden_size
            or (rows != "any" and head.shape[0] != rows)
        ):
            raise FormatError(
                "ColBERT head",
                path=self.folder,
                got=f"shape {list(head.shape)}",
                expected=f"[{rows}, {self.hidden_size}]",
            )
        return head.to(self.device, self.dtype)

    def _punctuation(self) -> set[int]:
        """Ids of ASCII punctuation. A sign that the vocabulary lacks is [UNK], so [UNK] is left out
        with it: ColBERT does the same."""
        encoded = (
            self._tokenizer.encode(symbol, add_special_tokens=False)
            for symbol in string.punctuation
        )
        return {ids[0] for ids in encoded if ids}

    def lay_out(self, texts: list[str], *, is_query: bool) -> list[Layout]:
        if is_query:
            return [self._query(ids) for ids in self.pieces(texts, self.query_maxlen - 1)]
        return [self._document(ids) for ids in self.pieces(texts, self.doc_maxlen - 1)]

    def _query(self, pieces: list[int]) -> Layout:
        ids = insert_after_first(pieces, self._query_marker)
        filled = self.query_maxlen - len(ids)
        attended = [True] * len(ids) + [bool(self.settings["attend_to_mask_tokens"])] * filled
        mask = self._tokenizer.mask_token_id
        ids = [mask if number == self._tokenizer.pad_token_id else number for number in ids] + [
            mask
        ] * filled
        return Layout(ids, attended, [True] * len(ids))

    def _document(self, pieces: list[int]) -> Layout:
        ids = insert_after_first(pieces, self._document_marker)
        return Layout(ids, [True] * len(ids), [number not in self._left_out for number in ids])

    def project(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self._head).to(torch.float32)
