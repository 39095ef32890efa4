"""What turns a prompt into an answer: a function of text, or a model whose passages come from a
`PassageKV` or are computed.

Nothing here imports a framework: a model is anything with `generate` as transformers has it.
"""

from __future__ import annotations

import inspect
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch

from .. import errors
from ..importers.chunks import count_words
from ..kv.passages.lossy import check_lossy
from .calibration import (
    CALIBRATED,
    MEAN,
    AttentionHeads,
    check_wanted,
    keep,
    model_key,
    reported_heads,
)
from .early import Prefetch
from .frames import model_frame, plain_frame
from .passages import FINGERPRINT, PASSAGE_KV, ComposedCache, PassageLibrary, loaded, takes
from .pieces import IdCounter, TextCounter, ids_of
from .prompt import Counter, Frame, Prompt, Wording
from .stop import Stop

#: What `generate` is given here, and what replaces it.
_OWN_OPTIONS = {
    "max_new_tokens": "max_new_tokens= of Rag",
    "max_length": "max_new_tokens= of Rag",
    "stopping_criteria": "deadline_s= of ask",
    "streamer": "none: an answer comes whole",
    "past_key_values": "kv= of Rag",
    "inputs": "the prompt of a question",
    "input_ids": "the prompt of a question",
    "inputs_embeds": "the prompt of a question",
    "attention_mask": "the prompt of a question",
    "return_dict_in_generate": "none: tokens alone",
}


@dataclass(frozen=True)
class Generated:
    """Attributes: as of `Answer`; `attention`: of each source, or None; `attention_heads`: whose it
    is, none: nobody's or the mean of all."""

    text: str
    tokens: int
    is_unfinished: bool = False
    first_token_s: float | None = None
    attention: tuple[float, ...] | None = None
    attention_heads: tuple[tuple[int, int], ...] = ()
    reused: Mapping[str, Any] | None = None


class Generator(Protocol):
    """See the module.

    Attributes:
        positions: tokens of prompt and answer at most; None: not known.
        max_new_tokens: of an answer.
    """

    @property
    def positions(self) -> int | None: ...
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def counter(self) -> Counter: ...
    @property
    def frame(self) -> Frame: ...

    @property
    def start_reads(self) -> Callable[[], Prefetch] | None:
        """Begins to read passages before they are asked for; None: there is nothing to read."""
        ...

    def generate(self, prompt: Prompt, stop: Stop, prefetch: Prefetch | None = None) -> Generated:
        """Raises what `Stop.check` raises. `prefetch`: what `start_reads` returned."""
        ...

    def close(self) -> None: ...


class FunctionGenerator:
    """A function that takes the prompt's text and returns the answer's.

    Args:
        function: called in the caller's thread.
        tokenizer: counts tokens (``tokenizer(text).input_ids``), piece by piece; None: words and
            signs are counted.
        wording, prefix, max_new_tokens: as of `Rag`.

    Raises InvalidInputError for a coroutine function, and for what is no function.
    """

    positions = start_reads = None

    def __init__(
        self,
        function: Callable[[str], str],
        tokenizer: Any,
        wording: Wording,
        prefix: str,
        max_new_tokens: int,
    ):
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise errors.InvalidInputError(
                "generate",
                got=repr(function),
                expected="a function that takes a prompt and returns a text",
                fix="lambda prompt: asyncio.run(generate(prompt)), which aask runs in a thread",
            )
        if tokenizer is not None and not callable(tokenizer):
            raise errors.InvalidInputError(
                "tokenizer",
                got=repr(tokenizer)[:60],
                expected="one of transformers, which counts tokens, or None",
            )
        self._function, self.max_new_tokens = function, max_new_tokens
        self.counter = TextCounter(
            count_words
            if tokenizer is None
            else lambda text: len(tokenizer(text, add_special_tokens=False).input_ids)
        )
        self.frame = plain_frame(self.counter, wording, prefix)

    def generate(self, prompt: Prompt, stop: Stop, prefetch: Prefetch | None = None) -> Generated:
        stop.check()
        found = self._function("".join(piece.text for piece in prompt.pieces))
        if not isinstance(found, str):
            raise errors.InvalidInputError(
                "what generate returned", got=type(found).__name__, expected="a str"
            )
        stop.check()
        return Generated(found, self.counter.count(found))

    def close(self) -> None:
        pass


class _Watch:
    """A streamer that notes when the first token came."""

    def __init__(self) -> None:
        self._calls, self.first_at = 0, None

    first_at: float | None

    def put(self, value: object) -> None:
        self._calls += 1
        if self._calls == 2:  # the prompt comes first
            self.first_at = time.perf_counter()

    def end(self) -> None:
        pass


class ModelGenerator:
    """A model of transformers with its tokenizer.

    Args:
        model: with `generate`; a chat template of its tokenizer is applied.
        kv: a `PassageLibrary`, the directory of one, or None: prompts are computed whole.
        library_bytes: of a directory.
        repair, blend: of `PassageKV.compose`.
        attention_heads: whose attention is reported, as of `Rag`.
        options: of `generate`, such as ``do_sample``.
        tokenizer, wording, prefix, max_new_tokens: as of `Rag`.

    Raises InvalidInputError, StateError where no heads were chosen that are to be `CALIBRATED`, and
    what opening a library raises.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        wording: Wording,
        prefix: str,
        max_new_tokens: int,
        *,
        kv: Any = None,
        library_bytes: int | str | None = None,
        repair: int | None = None,
        blend: float | None = None,
        attention_heads: Sequence[tuple[int, int]] | str | None = None,
        options: Mapping[str, Any] | None = None,
    ):
        if (
            isinstance(model, type)
            or not callable(getattr(model, "generate", None))
            or not hasattr(model, "config")
            or not callable(tokenizer)
            or not hasattr(tokenizer, "get_added_vocab")
        ):
            raise errors.InvalidInputError(
                "Rag: model and tokenizer",
                got=f"{type(model).__name__} and {type(tokenizer).__name__}",
                expected="a model of transformers and its tokenizer",
                fix="Rag(index, model, tokenizer), or Rag(index, generate=function)",
            )
        self._model, self._tokenizer = model, tokenizer
        self._options = _checked_options(options)
        self.max_new_tokens = max_new_tokens
        text = model.config.get_text_config(decoder=True)
        self.positions: int | None = getattr(text, "max_position_embeddings", None)
        there = (
            getattr(text, "num_hidden_layers", None) or 1 << 30,
            getattr(text, "num_attention_heads", None) or 1 << 30,
        )
        check_wanted(attention_heads, *there)
        self.counter = IdCounter(tokenizer)
        self.frame = model_frame(self.counter, tokenizer, wording, prefix)
        self._owned: Any = None
        self._library: PassageLibrary | None = None
        if kv is None and attention_heads not in (None, MEAN, CALIBRATED):
            raise errors.InvalidInputError(
                "attention_heads of a Rag",
                got="no kv=",
                expected="a library of passages, whose attention is known",
                fix="kv=DIRECTORY, or a PassageKV",
            )
        if library_bytes is not None and (kv is None or hasattr(kv, "compose")):
            raise errors.InvalidInputError(
                "library_bytes of a Rag",
                got="no kv=" if kv is None else "an open library, which has a limit of its own",
                expected="kv=DIRECTORY",
                fix="PassageKV(library_bytes=...)" if kv is not None else "kv=DIRECTORY",
            )
        check_lossy(repair, blend)
        self._lossy = {
            name: value
            for name, value in (("repair", repair), ("blend", blend))
            if value is not None
        }
        if kv is not None:
            self._library = kv if hasattr(kv, "compose") else self._opened(kv, library_bytes)
        try:
            self._check_lossy()
            self.heads = reported_heads(attention_heads, *there, self.directory, self._key)
        except BaseException:
            self.close()
            raise

    def _check_lossy(self) -> None:
        """Raises InvalidInputError where nobody computes tokens anew."""
        for name in self._lossy:
            compose = getattr(self._library, "compose", None)
            if compose is None or not takes(compose, name):
                raise errors.InvalidInputError(
                    f"{name} of a Rag",
                    got="no kv=" if compose is None else type(self._library).__name__,
                    expected=f"a library of passages whose compose takes {name}",
                    fix="kv=DIRECTORY, or a PassageKV",
                )

    # --- the heads whose attention is reported ---

    @property
    def directory(self) -> str | None:
        """The library's first one, which heads are kept in, too; None: its owner does not say."""
        found = getattr(self._library, "directories", None)
        return os.fspath(found[0]) if found else None

    def _key(self) -> str:
        """A name for the model, which takes a look at its weights."""
        return model_key(loaded(FINGERPRINT)(self._model))

    def use(self, found: AttentionHeads) -> None:
        """The heads that are reported from now on, kept where passages are. Raises WriteError."""
        if (directory := self.directory) is not None:
            keep(directory, self._key(), found)
        self.heads = found.heads

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Passages go into a library that nothing is left of: those of tests would take room, and
        the place of others. Raises StateError without a library."""
        library, directory = self._library, self.directory
        if library is None:
            raise errors.StateError(
                "attention of passages", got="no kv=", expected="a library of passages", fix="kv="
            )
        if directory is None:  # whose it is nobody here knows
            yield
            return
        with (
            tempfile.TemporaryDirectory(dir=directory, prefix=".calibration-") as folder,
            self._made(folder, None) as other,
        ):
            self._library = other
            try:
                yield
            finally:
                self._library = library

    def shares(self, prompt: Prompt, answer: str | None, stop: Stop) -> torch.Tensor:
        """Which share of their attention the answer's tokens paid to each source, head by head:
        float32 [layers, heads, sources].

        Args:
            answer: what the model is made to say; None: what it says.

        Raises what `Stop.check` raises.
        """
        said = [] if answer is None else ids_of(self.counter.data(answer))
        with closing(self._composed(prompt, stop)) as cache:
            asked = _asked(prompt)
            whole = sum(map(len, map(ids_of, prompt.pieces))) + len(said)
            if self.positions is not None and whole > self.positions:
                raise errors.InvalidInputError(
                    "answer of a known source",
                    got=f"{len(said)} tokens behind a prompt of {whole - len(said)}",
                    expected=f"{self.positions} positions in all",
                )
            cache.watch_heads()
            self._generate(
                {**self._given(cache, [*asked, *said]), "past_key_values": cache},
                stop,
                new=None if answer is None else 1,
            )
            begin = len(asked) - 1  # the token that the answer's first one comes from
            end = None if answer is None else begin + max(len(said), 1)
            mass = cache.head_mass(begin, end)[0, :, :, 1::2]  # labels are passages, too
            layers = cache.passage_mass().shape[1]
            return mass.mean(dim=1).unflatten(0, (layers, -1))

    def _attention(self, cache: ComposedCache, begin: int) -> tuple[float, ...]:
        """The share of each source, from the tokens from `begin` on behind the passages."""
        if self.heads:
            mass = cache.head_mass(begin)[0].mean(dim=(0, 1))
        else:
            mass = cache.passage_mass(begin)[0].mean(dim=0)
        return tuple(mass[1::2].tolist())  # labels are passages, too

    # --- answers ---

    def _opened(self, directory: Any, library_bytes: int | str | None) -> PassageLibrary:
        self._owned = self._made(directory, library_bytes)
        library: PassageLibrary = self._owned
        return library

    def _made(self, directory: Any, library_bytes: int | str | None) -> Any:
        return loaded(PASSAGE_KV)(
            self._model,
            directory,
            prefix=ids_of(self.frame.head),
            tokenizer=self._tokenizer,
            library_bytes=library_bytes,
        )

    def _composed(
        self, prompt: Prompt, stop: Stop, prefetch: Prefetch | None = None
    ) -> ComposedCache:
        """Raises what `Stop.check` raises, where the library asks in between."""
        if self._library is None:
            raise errors.StateError("passages of a prompt", got="no library", fix="kv=")
        compose: Callable[..., ComposedCache] = self._library.compose
        options: dict[str, Any] = dict(self._lossy)
        if prefetch is not None:
            options["prefetch"] = prefetch
        if takes(compose, "check"):
            options["check"] = stop.check
        return compose([ids_of(piece) for pair in prompt.sources for piece in pair], **options)

    def _given(self, cache: ComposedCache, ids: list[int]) -> Mapping[str, torch.Tensor]:
        return cache.prompt(torch.tensor([ids], device=self._model.device))

    @property
    def start_reads(self) -> Callable[[], Prefetch] | None:
        found: Callable[[], Prefetch] | None = getattr(self._library, "prefetch", None)
        return found

    def generate(self, prompt: Prompt, stop: Stop, prefetch: Prefetch | None = None) -> Generated:
        stop.check()
        if self._library is None or not prompt.sources:
            ids = [n for piece in prompt.pieces for n in ids_of(piece)]
            given = torch.tensor([ids], device=self._model.device)
            return self._generate(
                {"input_ids": given, "attention_mask": torch.ones_like(given)}, stop
            )
        asked, begun = _asked(prompt), time.perf_counter()
        with closing(self._composed(prompt, stop, prefetch)) as cache:
            stop.check()
            if self.heads:
                cache.watch_heads(self.heads)
            given = self._given(cache, asked)
            made = self._generate({**given, "past_key_values": cache}, stop, begun)
            # of beams the mass is each one's own, and which was chosen is not known
            is_one = self._options.get("num_beams", 1) == 1
            return replace(
                made,
                # from the token on that the answer's first one comes of
                attention=self._attention(cache, len(asked) - 1) if is_one else None,
                attention_heads=self.heads if is_one else (),
                reused=dict(cache.reused),
            )

    def _generate(
        self,
        given: Mapping[str, Any],
        stop: Stop,
        begun: float | None = None,
        new: int | None = None,
    ) -> Generated:
        begun, watch = time.perf_counter() if begun is None else begun, _Watch()
        options = {"do_sample": False} | self._options
        with torch.no_grad():
            made = self._model.generate(
                **given,
                **options,
                max_new_tokens=self.max_new_tokens if new is None else new,
                stopping_criteria=[stop],
                streamer=watch if options.get("num_beams", 1) == 1 else None,
            )
        stop.check()
        tokens = made[0, given["input_ids"].shape[1] :].tolist()
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        ends = options.get("eos_token_id", self._model.generation_config.eos_token_id)
        ended_by = [] if ends is None else torch.as_tensor(ends).flatten().tolist()
        is_ended = bool(tokens) and tokens[-1] in ended_by
        return Generated(
            str(text),
            len(tokens),
            len(tokens) >= self.max_new_tokens and not is_ended,
            None if watch.first_at is None else watch.first_at - begun,
        )

    def close(self) -> None:
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _asked(prompt: Prompt) -> list[int]:
    """Tokens behind the sources."""
    return [n for piece in prompt.pieces[-3:] for n in ids_of(piece)]


def _checked_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Those of `generate` that leave one answer of tokens. Raises InvalidInputError for others."""
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise errors.InvalidInputError(
            "generate_options",
            got=repr(options)[:60],
            expected="options of generate by name",
            fix="generate_options={'do_sample': True}",
        )
    for name in options:
        if name in _OWN_OPTIONS:
            raise errors.InvalidInputError(
                f"generate_options: {name}", got="given", expected=_OWN_OPTIONS[name]
            )
    if (answers := options.get("num_return_sequences", 1)) != 1:
        raise errors.InvalidInputError(
            "generate_options: num_return_sequences", got=repr(answers), expected=1
        )
    return dict(options)
