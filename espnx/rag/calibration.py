"""Which heads' attention names the source of an answer: chosen once a model, on questions whose
source is known, and kept beside the K and V of its passages.

What heads look at differs: a few look at what the next word is copied from (retrieval heads, Wu et
al. 2024, 2404.15574), others at the beginning or at what is near, and the mean of a layer has both.
No config says which are which, so a model is asked.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from .. import errors
from ..checks import check_text
from ..kv.passages.mass import check_heads
from ..storage.documents.ids import DocumentId, document_id
from ..storage.files import make_given_directory, write_error

#: Words for `attention_heads` of `Rag`.
MEAN, CALIBRATED = "mean", "calibrated"
#: Version 1 kept a layer.
_VERSION, _NAME = 2, "attention-"
#: Heads that are added up at most.
MOST_HEADS = 8
#: A file has a few hundred bytes; of a larger one no more is read.
_MOST_BYTES = 1 << 20
#: Passages that lines are planted in; questions are about some of them at a time.
_POOL = 24
_TEXT_OF_WORDS = (
    "amber anchor apple arrow autumn badge bamboo basket beacon bell blanket bottle branch "
    "bridge bronze butter cabin candle canvas carbon castle cedar chapel cherry circle clover "
    "cobalt copper coral cotton crystal desert diamond dolphin dragon eagle ember falcon "
    "feather fern forest fossil garden ginger glacier granite harbor hazel honey island ivory "
    "jade jasmine kettle ladder lantern lemon linen lotus magnet maple marble meadow mirror "
    "mountain nectar ocean olive orchid oyster panther pearl pepper pigeon planet pocket "
    "puzzle quartz rabbit raven ribbon river rocket saddle saffron salmon shadow silver "
    "spider temple thunder timber tulip turtle valley velvet violet walnut whistle willow "
    "winter zebra"
)
_WORDS = tuple(_TEXT_OF_WORDS.split())


@dataclass(frozen=True)
class KnownSource:
    """A question whose source is known.

    Attributes:
        question: as of `Rag.ask`.
        passage: the id of the passage that answers it.
        answer: what the model is made to say, while it is watched; None: what it says.

    Raises InvalidInputError.
    """

    question: str
    passage: DocumentId
    answer: str | None = None

    def __post_init__(self) -> None:
        check_text("KnownSource.question", self.question)
        if not self.question.strip():
            raise errors.InvalidInputError(
                "KnownSource.question", got=repr(self.question), expected="some text"
            )
        object.__setattr__(self, "passage", document_id(self.passage, "KnownSource.passage"))
        if self.answer is not None:
            check_text("KnownSource.answer", self.answer)


@dataclass(frozen=True)
class PlantedLine:
    """How a made-up fact reads, ``{name}`` and ``{value}`` in it, and how it is asked for: as a
    model answers best.

    Attributes:
        line: that is planted in a passage.
        question, answer: about it.
    """

    line: str = "The key of {name} is {value}."
    question: str = "What is the key of {name}?"
    answer: str = "The key of {name} is {value}."

    def __post_init__(self) -> None:
        for each in fields(self):
            if not isinstance(value := getattr(self, each.name), str) or "{name}" not in value:
                if each.name == "answer" and isinstance(value, str) and "{value}" in value:
                    continue
                raise errors.InvalidInputError(
                    f"PlantedLine.{each.name}", got=repr(value), expected="a str with {name}"
                )
            check_text(f"PlantedLine.{each.name}", value)

    def filled(self, text: str, name: str, value: str) -> str:
        """`text` with both names filled in; other braces stay."""
        return text.replace("{name}", name).replace("{value}", value)


@dataclass(frozen=True)
class AttentionHeads:
    """The heads whose attention names sources best, of a model. Half of the questions chose them,
    and the other half judged what follows.

    Attributes:
        heads: (layer, query head), from 0, the best first. Their attention is added up.
        right: the share of questions whose source got the most attention from them.
        layer_right: the same of each layer, the mean over all of its heads.
        mean_right: of the mean of all heads of all layers.
        questions: both halves.
        chance: what `right` would be without looking.
    """

    heads: tuple[tuple[int, int], ...]
    right: float
    layer_right: tuple[float, ...]
    mean_right: float
    questions: int
    chance: float


@dataclass(frozen=True)
class Planted:
    """Passages with a made-up fact each. Attributes: texts; names; values: of the facts."""

    texts: tuple[str, ...]
    names: tuple[str, ...]
    values: tuple[str, ...]


def planted(texts: Sequence[str], line: PlantedLine, rng: random.Random) -> Planted:
    """Plants a line of its own in each text, between two of its lines."""
    words = rng.sample(_WORDS, len(_WORDS))
    names, rest = words[: len(texts)], words[len(texts) :]
    values = [" ".join(rng.sample(rest, 2)) for _ in names]
    made = []
    for text, name, value in zip(texts, names, values, strict=True):
        lines = text.strip().splitlines()
        lines.insert(rng.randint(0, len(lines)), line.filled(line.line, name, value))
        made.append("\n".join(lines))
    return Planted(tuple(made), tuple(names), tuple(values))


def pool_of(texts: Sequence[str], k: int, rng: random.Random) -> list[str]:
    """The texts that lines are planted in. Raises InvalidInputError where there are too few."""
    usable = list(dict.fromkeys(text for text in texts if text.strip()))
    if len(usable) < 2:
        raise errors.InvalidInputError(
            "passages to calibrate on",
            got=f"{len(usable)} that are not empty",
            expected="2 or more in the index",
        )
    return rng.sample(usable, min(len(usable), max(_POOL, k)))


def chosen(shares: Sequence[torch.Tensor], sources: Sequence[int]) -> AttentionHeads:
    """Chooses heads: those that are right most often, alone, in the order of that; of them as many
    as are right most often together, at most `MOST_HEADS`. Where as many questions are right, what
    counts is how much of the attention that passages got went to the right one.

    Args:
        shares: of each question, float32 [layers, heads, passages]: the share of attention that its
            answer paid to each.
        sources: which of these passages is the source of each.

    Raises InvalidInputError for fewer than two questions.
    """
    if len(shares) < 2:
        raise errors.InvalidInputError(
            "questions to calibrate on",
            got=f"{len(shares)} whose source stood in the prompt",
            expected="2 or more",
            fix="more questions, or a larger k",
        )
    choosing, judging = slice(0, None, 2), slice(1, None, 2)
    n_heads = shares[0].shape[1]
    flat = [each.flatten(0, 1) for each in shares]  # [layers x heads, passages]
    alone = _score(flat[choosing], sources[choosing])
    order = torch.argsort(alone, descending=True, stable=True)[:MOST_HEADS]
    added = [each[order].cumsum(dim=0) for each in flat]  # [1, 2, ... heads, passages]
    count = int(_score(added[choosing], sources[choosing]).argmax()) + 1
    known = sources[judging]
    whole = [is_named(each, at) for each, at in zip(shares[judging], known, strict=True)]
    return AttentionHeads(
        heads=tuple((int(at) // n_heads, int(at) % n_heads) for at in order[:count]),
        right=float(_right(added[judging], known)[count - 1]),
        layer_right=tuple(_right([each.mean(dim=1) for each in shares[judging]], known).tolist()),
        mean_right=float(torch.stack(whole).double().mean()),
        questions=len(shares),
        chance=sum(1 / each.shape[-1] for each in shares) / len(shares),
    )


def is_named(
    shares: torch.Tensor, source: int, heads: Sequence[tuple[int, int]] = ()
) -> torch.Tensor:
    """bool: whether a source got more attention than any other passage.

    Args:
        shares: float32 [layers, heads, passages], as of `chosen`.
        source: which of the passages it is.
        heads: whose attention counts, their sum; none: that of all.
    """
    found = shares.flatten(0, 1)
    if heads:
        found = torch.stack([shares[layer, head] for layer, head in heads])
    return _most(found.mean(dim=0)[None], source)[0]


def _most(shares: torch.Tensor, source: int) -> torch.Tensor:
    """bool [ways], of shares [ways, passages]: whether this one got the most. None of several that
    got the same did."""
    others = torch.cat([shares[:, :source], shares[:, source + 1 :]], dim=1)
    return (shares[:, source, None] > others).all(dim=1)


def _right(shares: Sequence[torch.Tensor], sources: Sequence[int]) -> torch.Tensor:
    """float64 [ways], of shares [ways, passages]: how often each is right."""
    hits = [_most(each, at) for each, at in zip(shares, sources, strict=True)]
    return torch.stack(hits).double().mean(dim=0)


def _score(shares: Sequence[torch.Tensor], sources: Sequence[int]) -> torch.Tensor:
    """float64 [ways]: questions that are right, and below a whole one the lead."""
    least = torch.finfo(torch.float32).tiny
    leads = [
        each[:, at] / each.sum(dim=1).clamp_min(least)
        for each, at in zip(shares, sources, strict=True)
    ]
    hits = _right(shares, sources) * len(shares)
    return hits.round() + torch.stack(leads).double().mean(dim=0) / 2


# --- kept beside the passages ---


def model_key(fingerprint: Any) -> str:
    """A name for a model, of what tells it from another."""
    return hashlib.sha256(json.dumps(fingerprint, sort_keys=True, default=str).encode()).hexdigest()


def any_kept(directory: str) -> bool:
    """Whether heads were kept for any model: what tells models apart takes reading them."""
    try:
        return any(each.startswith(_NAME) for each in os.listdir(directory))
    except FileNotFoundError:
        return False


def _path(directory: str, key: str) -> str:
    return os.path.join(directory, f"{_NAME}{key[:32]}.json")


def keep(directory: str, key: str, found: AttentionHeads) -> None:
    """Keeps the heads of a model; what was kept for it before is gone. Raises WriteError."""
    make_given_directory(directory)
    path = _path(directory, key)
    text = json.dumps({"version": _VERSION, "model": key, **asdict(found)})
    try:
        # whole or not at all, and for nobody else's eyes
        descriptor, scratch = tempfile.mkstemp(dir=directory, prefix=f".{_NAME}")
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, path)
        except BaseException:
            os.unlink(scratch)
            raise
    except OSError as error:
        raise write_error("cannot keep the heads of attention", path, error) from error


def kept(directory: str, key: str) -> AttentionHeads | None:
    """The heads that were kept for a model; None: nobody has chosen any. Raises FormatError for a
    damaged file or one of another version, ReadError for one that cannot be read."""
    path = _path(directory, key)
    try:
        with open(path, "rb") as file:
            said = file.read(_MOST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise errors.ReadError(
            "the heads of attention", path=path, got=error.strerror, errno=error.errno
        ) from error
    try:
        found = json.loads(said)
        return _checked(found, key)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise errors.FormatError(
            "cannot read the heads of attention",
            path=path,
            got=str(error)[:120],
            expected=f"what `Rag.calibrate` keeps, version {_VERSION}",
            fix="espnx rag calibrate, or Rag(attention_heads='mean', ...).calibrate(), replaces it",
        ) from error


def _checked(found: Any, key: str) -> AttentionHeads:
    """Raises ValueError, TypeError, KeyError."""
    if found["version"] != _VERSION:
        raise ValueError(f"version {found['version']}")
    if found["model"] != key:
        raise ValueError(f"model {str(found['model'])[:8]}")
    heads, questions = tuple((layer, head) for layer, head in found["heads"]), found["questions"]
    rights = [found["right"], *found["layer_right"], found["mean_right"], found["chance"]]
    is_whole = all(type(each) is int and each >= 0 for pair in heads for each in pair)
    if not heads or not is_whole or type(questions) is not int:
        raise ValueError(f"heads {heads!r} of {questions!r} questions")
    if not all(isinstance(each, int | float) and 0 <= each <= 1 for each in rights):
        raise ValueError(f"shares {rights!r}")
    right, *layer_right, mean_right, chance = map(float, rights)
    return AttentionHeads(heads, right, tuple(layer_right), mean_right, questions, chance)


def check_wanted(wanted: Sequence[tuple[int, int]] | str | None, layers: int, heads: int) -> None:
    """`attention_heads` of a `Rag`, for a model of so many layers and heads. Raises
    InvalidInputError."""
    if isinstance(wanted, str) and wanted not in (MEAN, CALIBRATED):
        raise errors.InvalidInputError(
            "attention_heads",
            got=repr(wanted),
            expected=f"pairs (layer, head), {MEAN!r}, {CALIBRATED!r}, or None",
        )
    if wanted is not None and not isinstance(wanted, str):
        found = check_heads(wanted, layers, heads)
        if not found:
            raise errors.InvalidInputError("attention_heads", got="none", expected="1 or more")


def reported_heads(
    wanted: Sequence[tuple[int, int]] | str | None,
    layers: int,
    heads: int,
    directory: str | None,
    key: Callable[[], str],
) -> tuple[tuple[int, int], ...]:
    """The heads whose attention is reported; none: the mean of all.

    Args:
        wanted: see `check_wanted`.
        layers, heads: of the model.
        directory: where some may be kept; None: nowhere.
        key: gives the model's name there, see `model_key`.

    Raises StateError: none were chosen that are to be `CALIBRATED`; FormatError, ReadError.
    """
    if wanted == MEAN:
        return ()
    if wanted is not None and not isinstance(wanted, str):
        return tuple(check_heads(wanted, layers, heads))
    found = kept(directory, key()) if directory and any_kept(directory) else None
    if found is not None:
        try:
            check_heads(found.heads, layers, heads)
        except errors.InvalidInputError as error:
            raise errors.FormatError(
                "the heads of attention that were kept",
                path=directory,
                got=error.got,
                expected=error.expected,
                fix="calibrate again",
            ) from error
    if found is None and wanted == CALIBRATED:
        raise errors.StateError(
            f"attention_heads={CALIBRATED!r}",
            got="no heads that were chosen for this model"
            + (f" in {directory}" if directory else ", and no kv= to keep them in"),
            expected="some that `Rag.calibrate` has chosen and kept",
            fix="rag.calibrate(), or espnx rag calibrate; or attention_heads=None, the mean",
        )
    return () if found is None else found.heads
