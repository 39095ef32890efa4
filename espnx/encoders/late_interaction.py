"""What the encoders of late-interaction models share: a transformer, a projection of its states,
and which positions give token vectors.

The models differ in how ids are laid out (markers, masks that pad a query), which of them are kept,
and what projects the states; that is what a subclass says. Texts are cut at the model's own length,
as it was trained and as its own package does.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..errors import FormatError, InvalidInputError
from ..forks import compute_alone
from ..ops.precision import whole_float32
from ..retrieval.encoder import Encoded, check_texts
from .checkpoints import load_transformer, positions
from .windows import LENGTH_STEP, batches, torch_dtype

TEXTS_AT_ONCE = 1024


@dataclass(frozen=True)
class Layout:
    """One text as the model sees it.

    Attributes:
        ids: of all positions.
        attended: for each, whether attention sees it.
        kept: for each, whether its vector is one of the text's token vectors.
        words: for each kept position the number of its word, where vectors of words are wanted.
    """

    ids: list[int]
    attended: list[bool]
    kept: list[bool]
    words: list[int] | None = None


class LateInteractionEncoder(ABC):
    """See the module. For the rest see :class:`espnx.retrieval.encoder.Encoder`.

    Args:
        folder: of the transformer and its tokenizer.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``. Results are on the CPU in any case.
        dtype: of the forward pass: ``"fp32"``, or ``"bf16"``, which differs, and is faster on
            hardware for it (docs/encoders.md).
        batch_tokens: most positions in one forward pass (a single longer text goes alone).

    Raises:
        InvalidInputError, FormatError, MissingDependencyError: as
            `espnx.encoders.checkpoints.load_transformer`.
    """

    name: str
    d_cls: int = 0
    dim: int

    def __init__(
        self, folder: str | os.PathLike[str], *, device: str, dtype: str, batch_tokens: int
    ):
        if batch_tokens < 1:
            raise InvalidInputError(
                "encoder: batch_tokens", got=batch_tokens, expected="at least 1"
            )
        self.folder, self.batch_tokens = Path(folder), batch_tokens
        self.device, self.dtype = torch.device(device), torch_dtype(dtype)
        self._model, self._tokenizer = load_transformer(self.folder, self.dtype, pickled=True)
        self._model.to(self.device).eval()
        self.positions = positions(self._model.config, self._tokenizer)
        self.hidden_size: int = self._model.config.hidden_size

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: cls [{self.d_cls}], tokens [n, {self.dim}]>"

    @abstractmethod
    def lay_out(self, texts: list[str], *, is_query: bool) -> list[Layout]:
        """What the model sees of each text."""

    @abstractmethod
    def project(self, hidden: Tensor) -> Tensor:
        """Hidden states, ``[B, L, hidden]`` on `device` in the dtype of the forward pass, to
        float32 ``[B, L, anything]``."""

    def finish(self, vectors: Tensor, layout: Layout) -> Encoded:
        """A text's vectors from what `project` made of its positions, float32 ``[L, anything]`` on
        the CPU."""
        kept = vectors[torch.tensor(layout.kept, dtype=torch.bool)]
        return Encoded(torch.empty(0), normalize(kept, dim=1))

    def encode_documents(self, texts: list[str]) -> list[Encoded]:
        return self._encode(texts, is_query=False)

    def encode_queries(self, texts: list[str]) -> list[Encoded]:
        return self._encode(texts, is_query=True)

    def _encode(self, texts: list[str], *, is_query: bool) -> list[Encoded]:
        compute_alone()
        texts = check_texts(texts)
        results: list[Encoded] = []
        for begin in range(0, len(texts), TEXTS_AT_ONCE):
            layouts = self.lay_out(texts[begin : begin + TEXTS_AT_ONCE], is_query=is_query)
            made: dict[int, Encoded] = {}
            for batch in batches(
                [self._padded(len(layout.ids)) for layout in layouts], self.batch_tokens
            ):
                for index, vectors in zip(
                    batch, self._forward([layouts[index] for index in batch]), strict=True
                ):
                    made[index] = self.finish(vectors, layouts[index])
            results += [made[index] for index in range(len(layouts))]
        return results

    def _padded(self, length: int) -> int:
        return max(length, min(-(-length // LENGTH_STEP) * LENGTH_STEP, self.positions))

    def _forward(self, layouts: list[Layout]) -> Iterator[Tensor]:
        """Yields what `project` made of each layout of n positions, float32 ``[n, anything]`` on
        the CPU."""
        longest = self._padded(max(len(layout.ids) for layout in layouts))
        ids = torch.full(
            (len(layouts), longest), self._tokenizer.pad_token_id or 0, dtype=torch.int64
        )
        attended = torch.zeros(len(layouts), longest, dtype=torch.int64)
        for number, layout in enumerate(layouts):
            ids[number, : len(layout.ids)] = torch.tensor(layout.ids)
            attended[number, : len(layout.ids)] = torch.tensor(layout.attended, dtype=torch.int64)
        if int(ids.max()) >= self._model.config.vocab_size:
            raise InvalidInputError(
                f"encode with {self.folder}",
                got=f"token id {int(ids.max())}",
                expected=f"ids below the model's {self._model.config.vocab_size}",
                fix="use the tokenizer that belongs to the model",
            )
        with torch.inference_mode(), whole_float32():
            output = self._model(
                input_ids=ids.to(self.device), attention_mask=attended.to(self.device)
            )
            projected = self.project(output.last_hidden_state).to("cpu", torch.float32)
        # The caller keeps what it takes of this, beyond inference mode.
        yield from (
            vectors[: len(layout.ids)].clone()
            for vectors, layout in zip(projected, layouts, strict=True)
        )

    def pieces(self, texts: list[str], length: int) -> list[list[int]]:
        """Ids of each text with the tokenizer's own special tokens, cut to `length`."""
        made: list[list[int]] = self._tokenizer(
            texts, truncation=True, max_length=length, verbose=False
        )["input_ids"]
        return made

    def check_length(self, what: str, value: Any, least: int) -> int:
        """A length in positions. Raises InvalidInputError where the model has fewer."""
        if (
            not isinstance(value, int)
            or isinstance(value, bool)
            or not least <= value <= self.positions
        ):
            raise InvalidInputError(
                f"encoder: {what}",
                got=repr(value),
                expected=f"{least} to the model's {self.positions}",
            )
        return value

    def token_id(self, token: str, what: str) -> int:
        """The id of a token that the model was trained with. Raises FormatError where the tokenizer
        does not know it."""
        number = self._tokenizer.convert_tokens_to_ids(token)
        if number is None or number == self._tokenizer.unk_token_id:
            raise FormatError(
                what,
                path=self.folder,
                got=f"{token!r}, which the tokenizer does not know",
                expected="a token of its vocabulary",
            )
        return int(number)


def insert_after_first(ids: list[int], marker: int) -> list[int]:
    """``[CLS] a b`` to ``[CLS] marker a b``."""
    return [*ids[:1], marker, *ids[1:]]


def settings_hash(contents: str, settings: Iterable[Any]) -> str:
    """Twelve digits for a model's contents and its settings."""
    return hashlib.sha256(f"{contents}\n{json.dumps(list(settings))}".encode()).hexdigest()[:12]
