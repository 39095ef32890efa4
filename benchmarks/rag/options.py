"""The options of ``espnx bench rag``, read and checked."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espnx.errors import InvalidInputError
from espnx.models import DEMO, demo_model

from ..harness.arguments import choices, positive, words
from ..harness.registry import Say
from ..kv.fleet import folder_in, scratch_parent
from ..kv.systems import smollm2
from ..kv.systems.models import load_model
from .names import SHOWS

PREFIX_TOKENS, QUESTION_TOKENS = 32, 64
_QUICK_PASSAGES, _QUICK_ANSWERS, _QUICK_QUALITY = 48, 8, 3
_ANSWERS, _QUALITY = 200, 80


@dataclass(frozen=True)
class Options:
    """See the case's help."""

    path: Path
    shows: list[str]
    models: list[str]
    tokens: list[int]
    passage_tokens: list[int]
    passages: int
    answers: int
    quality: int
    pairs: int
    seed: int
    quick: bool


@dataclass(frozen=True)
class Opened:
    """A model, ready to decode. Attributes: name: in the rows; folder: that it came from."""

    name: str
    folder: Path
    model: Any
    tokenizer: Any


def read_options(args: Namespace) -> Options:
    """Raises InvalidInputError, MissingDependencyError."""
    quick = args.quick
    shows = choices(args.show or ",".join(SHOWS if quick else SHOWS[:1]), SHOWS, "--show")
    models = words(args.model)
    for name in models:
        if name == smollm2.KEY:
            smollm2.require()
        elif name != DEMO and not (Path(name) / "config.json").is_file():
            raise InvalidInputError(
                "--model",
                got=repr(name),
                expected=f"{DEMO}, {smollm2.KEY}, or a folder with config.json",
            )
    if not models:
        raise InvalidInputError("--model", got="none", expected="one or more")
    tokens, passage_tokens = (
        [positive(f"--{name}", word) for word in words(getattr(args, name.replace("-", "_")))]
        for name in ("tokens", "passage-tokens")
    )
    if quick:
        tokens, passage_tokens = [512], [128]
    for total in tokens:
        for each in passage_tokens:
            if total % each:
                raise InvalidInputError(
                    "--tokens", got=total, expected=f"a multiple of --passage-tokens {each}"
                )
    asked = None if args.questions is None else positive("--questions", args.questions)
    return Options(
        path=Path(args.path).resolve(),
        shows=shows,
        models=models,
        tokens=tokens,
        passage_tokens=passage_tokens,
        passages=_QUICK_PASSAGES if quick else positive("--passages", args.passages),
        answers=_QUICK_ANSWERS if quick else asked or _ANSWERS,
        quality=_QUICK_QUALITY if quick else asked or _QUALITY,
        pairs=positive("--pairs", args.pairs),
        seed=args.seed,
        quick=quick,
    )


@contextlib.contextmanager
def opened(name: str, path: Path, say: Say) -> Iterator[Opened]:
    """A model of `--model` in fp32, able to attend over stored rows."""
    from transformers import AutoTokenizer

    from espnx.integrations.transformers.enable import enable_kv_cache

    with contextlib.ExitStack() as stack:
        if name == DEMO:
            folder = demo_model()
        elif name == smollm2.KEY:
            folder = Path(stack.enter_context(folder_in(scratch_parent(path)))) / smollm2.NAME
            say(f"{smollm2.NAME} becomes a folder")
            smollm2.write_folder(folder)
        else:
            folder = Path(name)
        label = name
        if folder.name.startswith(smollm2.NAME):
            label = smollm2.KEY
        elif name != DEMO:
            label = folder.resolve().name
        yield Opened(
            label,
            folder,
            enable_kv_cache(load_model(folder, "fp32")),
            AutoTokenizer.from_pretrained(folder, local_files_only=True),
        )
