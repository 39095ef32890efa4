"""What the model encoders share: texts of any length through a model that sees a limited number of
positions.

A text whose wordpieces do not fit is cut into windows of nearly equal length, each is encoded by
itself (between the model's own special tokens), and the windows' token vectors are concatenated:
nothing is ever left out. Windows of all texts are sorted by length and batched under a budget of
tokens, so that little is computed for padding and memory does not grow with the number of texts.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..errors import InvalidInputError
from ..forks import compute_alone
from ..ops.precision import whole_float32
from ..retrieval.encoder import BF16, Encoded, check_texts

# Batches are padded to multiples of this. oneDNN builds and keeps code for every shape it meets, in
# between the blocks that malloc could otherwise give back: with every length from 1 to 256 a
# process was 270 MB larger after 150k tokens.
LENGTH_STEP = 16


class Window(NamedTuple):
    """A run of one text's wordpieces."""

    text: int  # its number in the call
    ids: list[int]  # with the special tokens around


class WindowedEncoder(ABC):
    """Windows, batches, pooling and normalisation around a model's forward pass (:meth:`hidden`).

    For the rest see :class:`espnx.retrieval.encoder.Encoder`.

    Attributes:
        prefix: ids that the model expects before the wordpieces of a window (``[CLS]``); their
            vectors are no tokens.
        suffix: ids that it expects after them (``[SEP]``), likewise.
        window_tokens: positions of a window, special tokens included.
        batch_tokens: most positions in one forward pass, padding included (a single longer window
            goes alone).
        pooling: ``"mean"`` over all vectors of a window, special tokens included as
            sentence-transformers does, or ``"cls"``, the first.
        pad_id: what fills the batch; masked, so any id that the model has.
    """

    name: str
    d_cls: int
    dim: int
    prefix: list[int]
    suffix: list[int]
    window_tokens: int
    batch_tokens: int
    pooling: str
    pad_id: int = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: cls [{self.d_cls}], tokens [n, {self.dim}]>"

    @abstractmethod
    def wordpieces(self, texts: list[str]) -> Iterator[list[int]]:
        """Yields each text's ids without special tokens, not truncated."""

    @abstractmethod
    def hidden(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Last hidden states.

        Args:
            ids: ``[B, L]`` int64 on the CPU, padded at the end.
            mask: ``[B, L]`` bool on the CPU, False at padding; None where there is no padding.

        Returns:
            ``[B, L, dim]`` on the CPU, float32, whatever at padding.
        """

    def encode_documents(self, texts: list[str]) -> list[Encoded]:
        return self._encode(texts)

    def encode_queries(self, texts: list[str]) -> list[Encoded]:
        return self._encode(texts)

    def _encode(self, texts: list[str]) -> list[Encoded]:
        compute_alone()
        texts = check_texts(texts)
        windows = self._windows(texts)
        rows = [len(window.ids) - len(self.prefix) - len(self.suffix) for window in windows]
        begins = [0, *itertools.accumulate(rows)]
        tokens = torch.empty(begins[-1], self.dim)
        pooled = torch.zeros(len(windows), self.dim)
        for batch in batches(
            [self._padded(len(window.ids)) for window in windows], self.batch_tokens
        ):
            for index, vectors in zip(
                batch, self._hidden_of([windows[index].ids for index in batch]), strict=True
            ):
                inner = vectors[len(self.prefix) : len(vectors) - len(self.suffix)]
                tokens[begins[index] : begins[index + 1]] = normalize(inner, dim=-1)
                if len(vectors):
                    pooled[index] = (
                        vectors.sum(0) if self.pooling == "mean" else vectors[0] * len(vectors)
                    )
        owners = torch.tensor([window.text for window in windows], dtype=torch.int64)
        cls = normalize(torch.zeros(len(texts), self.dim).index_add_(0, owners, pooled), dim=-1)
        lengths = [0] * len(texts)
        for window, count in zip(windows, rows, strict=True):
            lengths[window.text] += count
        return [Encoded(*pair) for pair in zip(cls.unbind(), tokens.split(lengths), strict=True)]

    def _windows(self, texts: list[str]) -> list[Window]:
        room = self.window_tokens - len(self.prefix) - len(self.suffix)
        return [
            Window(number, [*self.prefix, *piece, *self.suffix])
            for number, ids in enumerate(self.wordpieces(texts))
            for piece in split_evenly(ids, room)
        ]

    def _padded(self, length: int) -> int:
        return min(-(-length // LENGTH_STEP) * LENGTH_STEP, self.window_tokens)

    def _hidden_of(self, rows: list[list[int]]) -> Iterator[Tensor]:
        """``[n, dim]`` float32 for each row of n ids."""
        longest = self._padded(max(map(len, rows)))
        if longest == 0:  # an empty text, and a model without special tokens
            yield from (torch.zeros(0, self.dim) for _ in rows)
            return
        ids = torch.full((len(rows), longest), self.pad_id, dtype=torch.int64)
        mask = torch.zeros(len(rows), longest, dtype=torch.bool)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
            mask[number, : len(row)] = True
        with torch.inference_mode(), whole_float32():
            hidden = self.hidden(ids, None if bool(mask.all()) else mask)
        yield from (vectors[: len(row)] for vectors, row in zip(hidden, rows, strict=True))


def split_evenly(ids: list[int], room: int) -> list[list[int]]:
    """``ids`` in ceil(n / room) runs, at least one, whose lengths differ by at most one (a short
    last window would have little context)."""
    count = max(1, -(-len(ids) // room))
    edges = [len(ids) * number // count for number in range(count + 1)]
    return [ids[begin:end] for begin, end in itertools.pairwise(edges)]


def batches(lengths: list[int], budget: int) -> Iterator[list[int]]:
    """Indices of ``lengths`` in groups whose count times longest is within ``budget``, longest
    first (memory peaks at the start)."""
    group: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if group and lengths[group[0]] * (len(group) + 1) > budget:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def torch_dtype(dtype: str) -> torch.dtype:
    """The dtype of a forward pass by its name: ``"fp32"`` or ``"bf16"``. It never depends on the
    processor: what is found must not.

    Raises:
        InvalidInputError: another name.
    """
    known = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if dtype not in known:
        raise InvalidInputError("encoder: dtype", got=repr(dtype), expected='"fp32" or "bf16"')
    return known[dtype]


def named(model: str, dtype: torch.dtype) -> str:
    """The name of a model (`espnx.retrieval.encoder.Encoder.name`) that computes in that dtype."""
    return model + BF16 if dtype == torch.bfloat16 else model
