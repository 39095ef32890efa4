"""What prompts are made of, while they are composed and used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from .... import errors
from ....kv.passages.context import Passage
from ....kv.passages.extent import Extent, Identity

Ids: TypeAlias = Sequence[int] | torch.Tensor | np.ndarray[Any, Any]

MODES = ("prefix", "blocks")


@dataclass
class Prompts:
    """One prompt, or those of a batch.

    Attributes:
        mode: as of `PassageKV.compose`.
        n_prefix: texts of each prompt that are its prefix: 0 or 1.
        texts: tokens of the prefix, where there is one, and of each passage, prompt by prompt.
        of: the prompt of each, from 0.
        identities: of each.
        passages: those that are there so far, in the same order.
        pins: extents in use.
        reused: see `PassageCache.reused`.
        check: is called before a part of a passage is computed, and may raise.
    """

    mode: str
    n_prefix: int
    texts: list[np.ndarray]
    of: list[int]
    identities: list[Identity]
    passages: list[Passage] = field(default_factory=list)
    pins: list[Extent] = field(default_factory=list)
    reused: dict[str, Any] = field(default_factory=dict)
    check: Callable[[], object] = lambda: None

    @classmethod
    def made(
        cls, mode: str, space: bytes, prefix: np.ndarray, every: Sequence[Sequence[np.ndarray]]
    ) -> Prompts:
        """Prompts of which each is the prefix and passages, given as tokens."""
        before = [prefix] if prefix.size else []
        self = cls(mode, len(before), [], [], [])
        for number, passages in enumerate(every):
            self.texts += [*before, *passages]
            self.of += [number] * (len(before) + len(passages))
        for number, ids in enumerate(self.texts):
            behind = [self.texts[i] for i in self.before(number)]
            self.identities.append(Identity.of(space, behind, ids))
        counted = ("reused", "computed", "uncached", "damaged", "repaired")
        in_bytes = ("prefetched", "hidden", "wasted")
        tokens = sum(map(len, self.texts))
        self.reused = {"tokens": tokens} | dict.fromkeys([*counted, *in_bytes], 0)
        return self

    @property
    def count(self) -> int:
        """Prompts; at least one, which may be empty."""
        return self.of[-1] + 1 if self.of else 1

    def place(self, number: int) -> int:
        """Which of its prompt's texts a text is, from 0."""
        return number - self.of.index(self.of[number])

    def before(self, number: int) -> range:
        """The texts that a text is computed behind: the prefix, or all that stands before it."""
        first = self.of.index(self.of[number])
        return range(first, number if self.mode == "prefix" else min(number, first + self.n_prefix))

    def of_prompt(self, prompt: int) -> Iterator[int]:
        """The texts of a prompt."""
        return (number for number, of in enumerate(self.of) if of == prompt)

    def offset(self, number: int) -> int:
        """How many positions behind the place where it was computed a text stands."""
        begin = sum(len(self.texts[i]) for i in range(number - self.place(number), number))
        return begin - self.identities[number].first_position

    def ids(self) -> tuple[np.ndarray, np.ndarray]:
        """(tokens int32 [prompts, n], bool [prompts, n]: which are not padding): shorter prompts
        are padded in front."""
        rows = [
            np.concatenate(
                [np.empty(0, np.int32), *[self.texts[i] for i in self.of_prompt(prompt)]]
            ).astype(np.int32)
            for prompt in range(self.count)
        ]
        most = max(map(len, rows))
        ids, is_token = (np.zeros((len(rows), most), kind) for kind in (np.int32, np.bool_))
        for row, each in enumerate(rows):
            ids[row, most - len(each) :], is_token[row, most - len(each) :] = each, True
        return ids, is_token


def passages_of(passages: object) -> list[Any]:
    """What was given as several passages, or prompts. Raises InvalidInputError for one text, and
    for what has no order."""
    has_order = isinstance(passages, Iterable) and not isinstance(
        passages, str | bytes | bytearray | Mapping | Set
    )
    if not has_order or getattr(passages, "ndim", 1) == 0:
        raise errors.InvalidInputError(
            "passages",
            got=repr(passages)[:60],
            expected="a list of names that `add` returned, or of token ids",
            fix="compose([passage])",
        )
    return list(passages)  # type: ignore[call-overload]


def prompts_of(passages: Sequence[Any]) -> list[list[str | Ids]]:
    """The passages of each prompt. Raises InvalidInputError for what is no list of them, and where
    prompts and passages are mixed."""
    given = passages_of(passages)
    prompts = [each for each in given if isinstance(each, list | tuple) and _has_passages(each)]
    empty = [each for each in given if isinstance(each, list | tuple) and not each]
    if prompts and len(prompts) + len(empty) == len(given):
        return [list(each) for each in given]
    if prompts:
        raise errors.InvalidInputError(
            "passages",
            got="passages, and lists of passages",
            expected="passages, or a list of passages for each prompt",
        )
    return [given]


def _has_passages(given: Sequence[Any]) -> bool:
    """Whether this is a list of passages, and not token ids."""
    return any(isinstance(x, str | list | tuple) or getattr(x, "ndim", 0) for x in given)


def check_ids(what: str, ids: Ids, vocabulary: int) -> np.ndarray:
    """Token ids, below `vocabulary`, as int32 [n]. Raises InvalidInputError."""
    try:
        found = np.asarray(ids.cpu() if isinstance(ids, torch.Tensor) else ids)
    except (TypeError, ValueError, RuntimeError) as error:  # the last of them: of tensors
        raise errors.InvalidInputError(what, got=repr(ids)[:60], expected="token ids") from error
    if found.ndim == 2 and found.shape[0] == 1:
        found = found[0]
    is_whole = found.size == 0 or found.dtype.kind in "iu"
    if found.ndim != 1 or not is_whole:
        raise errors.InvalidInputError(
            what, got=f"{found.dtype} {list(found.shape)}", expected="whole numbers [n]"
        )
    if found.size and not 0 <= int(found.min()) <= int(found.max()) < vocabulary:
        raise errors.InvalidInputError(
            what, got=f"{found.min()} to {found.max()}", expected=f"ids from 0 to {vocabulary - 1}"
        )
    return found.astype(np.int32)
