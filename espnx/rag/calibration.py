"""Which layer's attention names the source of an answer: chosen once a model, on questions whose
source is known, and kept beside the K and V of its passages.

What a layer looks at differs: some tell sources apart, some look at the beginning or at what is
near. No config says which do, so a model is asked.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from .. import errors
from ..storage.documents.ids import DocumentId
from ..storage.files import make_given_directory, write_error

_VERSION, _NAME = 1, "attention-"
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
    """

    question: str
    passage: DocumentId
    answer: str | None = None


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

    def filled(self, text: str, name: str, value: str) -> str:
        """`text` with both names filled in; other braces stay."""
        return text.replace("{name}", name).replace("{value}", value)


@dataclass(frozen=True)
class AttentionLayer:
    """The layer whose attention names sources best, of a model.

    Attributes:
        layer: from 0. Half of the questions chose it.
        right: of each layer, the share of the other questions whose source got the most attention.
        mean_right: the same for the mean of all layers.
        questions: both halves.
        chance: what `right` would be without looking.
    """

    layer: int
    right: tuple[float, ...]
    mean_right: float
    questions: int
    chance: float

    @property
    def layer_right(self) -> float:
        """`right` of `layer`."""
        return self.right[self.layer]


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


def chosen(shares: Sequence[torch.Tensor], sources: Sequence[int]) -> AttentionLayer:
    """Chooses a layer.

    Args:
        shares: of each question, float32 [layers, passages]: the share of attention that its answer
            paid to each.
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
    hits = torch.stack(
        [each.argmax(dim=1) == source for each, source in zip(shares, sources, strict=True)]
    )
    # how much of what passages got went to the right one, where as many questions are right
    lead = torch.stack(
        [
            each[:, source] / each.sum(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
            for each, source in zip(shares, sources, strict=True)
        ]
    )
    choosing, judging = slice(0, None, 2), slice(1, None, 2)
    score = hits[choosing].double().sum(dim=0) + lead[choosing].double().mean(dim=0) / 2
    means = [int(each.mean(dim=0).argmax()) == at for each, at in zip(shares, sources, strict=True)]
    return AttentionLayer(
        layer=int(score.argmax()),
        right=tuple(hits[judging].double().mean(dim=0).tolist()),
        mean_right=sum(means[judging]) / len(means[judging]),
        questions=len(shares),
        chance=sum(1 / each.shape[1] for each in shares) / len(shares),
    )


# --- kept beside the passages ---


def model_key(fingerprint: Any) -> str:
    """A name for a model, of what tells it from another."""
    return hashlib.sha256(json.dumps(fingerprint, sort_keys=True, default=str).encode()).hexdigest()


def any_kept(directory: str) -> bool:
    """Whether a layer was kept for any model: what tells models apart takes reading them."""
    try:
        return any(each.startswith(_NAME) for each in os.listdir(directory))
    except FileNotFoundError:
        return False


def _path(directory: str, key: str) -> str:
    return os.path.join(directory, f"{_NAME}{key[:32]}.json")


def keep(directory: str, key: str, found: AttentionLayer) -> None:
    """Keeps the layer of a model; what was kept for it before is gone. Raises WriteError."""
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
        raise write_error("cannot keep the layer of attention", path, error) from error


def kept(directory: str, key: str) -> AttentionLayer | None:
    """The layer that was kept for a model; None: nobody has chosen one. Raises FormatError for a
    damaged file, ReadError for one that cannot be read."""
    path = _path(directory, key)
    try:
        with open(path, "rb") as file:
            said = file.read(_MOST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise errors.ReadError(
            "the layer of attention", path=path, got=error.strerror, errno=error.errno
        ) from error
    try:
        found = json.loads(said)
        return _checked(found, key)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise errors.FormatError(
            "cannot read the layer of attention",
            path=path,
            got=str(error)[:120],
            expected="what `Rag.calibrate` keeps",
            fix="remove the file, or calibrate again",
        ) from error


def _checked(found: Any, key: str) -> AttentionLayer:
    """Raises ValueError, TypeError, KeyError."""
    if found["version"] != _VERSION or found["model"] != key:
        raise ValueError(f"version {found['version']} of model {str(found['model'])[:8]}")
    layer, right, questions = found["layer"], found["right"], found["questions"]
    shares = [*right, found["mean_right"], found["chance"]]
    whole = all(isinstance(each, int) and not isinstance(each, bool) for each in (layer, questions))
    if not whole or not 0 <= layer < len(right) or not all(0 <= each <= 1 for each in shares):
        raise ValueError(f"layer {layer!r} of {len(right)}")
    return AttentionLayer(
        layer, tuple(map(float, right)), found["mean_right"], questions, found["chance"]
    )
