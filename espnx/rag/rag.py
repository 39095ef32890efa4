"""`Rag`: a question, the passages of an index that answer it, a model's answer, and its
references."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch

from .. import errors
from ..checks import check_path, check_text, check_whole
from ..forks import check_own
from ..retrieval.encoder import AUTO, EncoderLike
from ..retrieval.search.index import Index
from ..retrieval.search.options import SearchKeywords
from ..retrieval.search.result import Hit
from ..suggestions import suggests_keywords
from .answer import Answer, AnswerTimings, Reference
from .arguments import check_asked, check_count, check_deadline, known_sources, search_of
from .calibration import (
    AttentionHeads,
    KnownSource,
    PlantedLine,
    chosen,
    is_named,
    planted,
    pool_of,
)
from .early import EarlyPassages, Prefetch
from .generation import FunctionGenerator, Generated, Generator, ModelGenerator
from .markers import MarkedText, cited_sentences, parse
from .passages import PassageLibrary
from .pieces import ids_of
from .prompt import Prompt, Wording, fingerprint, make_prompt
from .stop import Stop
from .support import supports

#: Tokens of a prompt for a function, whose limit nobody knows.
_PROMPT_TOKENS = 4096
_READ_DEADLINE_S = 30.0
#: Coroutines whose answers are worked on at a time; others wait without a thread.
_TOGETHER = 4
#: Of an index, the first so many documents are looked at for passages to plant lines in; a line
#: takes so many tokens at most.
_LOOKED_AT, _LINE_TOKENS = 256, 48


class Rag:
    """Answers questions from the passages of an index. Safe to use from several threads; a model
    answers one of them at a time. A context manager.

    Args:
        index: the path of an index, or an open one, which stays the caller's.
            `espnx.chunk_documents` cuts long documents into passages that know where they come
            from.
        model, tokenizer: of transformers, on any device. With `generate`, the tokenizer counts
            tokens.
        generate: in place of a model: a function that takes the prompt's text and returns the
            answer's. It is called by several threads, if `ask` is.
        kv: where K and V of passages are kept, so that they are computed once and then read,
            wherever they stand in a prompt: a directory on the SSD, or an open `PassageKV` whose
            prefix is `frame_ids`, which stays the caller's. Passages then do not see one another
            (its mode ``blocks``). None: every prompt is computed whole.
        prefix: the system prompt.
        wording: the words around sources and question.
        encoder: of the index, where a path is given; as of `espnx.open`.
        max_new_tokens: of an answer.
        prompt_tokens: of a prompt, at most. None: as many as the model's positions leave beside
            the answer, or 4,096 for a function.
        passage_tokens: of one passage; the rest of a longer one is cut.
        library_bytes: as of `PassageKV`, where `kv` is a directory.
        repair, blend: as of `PassageKV.compose`: tokens of the passages that are computed anew at
            their place, where they see those before them. `Reference.attention` leaves them out.
        attention_heads: (layer, query head), from 0, of the heads whose attention
            `Reference.attention` is, their mean; None: those that `calibrate` has chosen for this
            model and kept beside its passages, or else the mean of all, which names the right
            source less often; ``mean``: that; ``calibrated``: those that were chosen, and nothing
            else.
        generate_options: of the model's `generate`, such as ``{"do_sample": True}``. With beams no
            attention is reported.

    Attributes:
        index: that is searched.

    Raises:
        InvalidInputError: an argument is out of range, or a chat template drops what a user says.
        MissingDependencyError: `kv` is a directory, and this installation has no `PassageKV`.
        StateError: `attention_heads` are to be ``calibrated``, and nobody has chosen any.
        FormatError: the file of the chosen ones is damaged or of another version.
        StoreNotFoundError, ...: what opening an index raises, or a library of passages.
    """

    @suggests_keywords
    def __init__(
        self,
        index: Index | str | os.PathLike[str],
        model: Any = None,
        tokenizer: Any = None,
        *,
        generate: Callable[[str], str] | None = None,
        kv: PassageLibrary | str | os.PathLike[str] | None = None,
        prefix: str = "",
        wording: Wording | None = None,
        encoder: EncoderLike | None = AUTO,
        max_new_tokens: int = 256,
        prompt_tokens: int | None = None,
        passage_tokens: int = 512,
        library_bytes: int | str | None = None,
        repair: int | None = None,
        blend: float | None = None,
        attention_heads: Sequence[tuple[int, int]] | str | None = None,
        generate_options: Mapping[str, Any] | None = None,
    ):
        check_count("max_new_tokens", max_new_tokens, 1)
        check_count("passage_tokens", passage_tokens, 1)
        if prompt_tokens is not None:
            check_count("prompt_tokens", prompt_tokens, 1)
        check_text("prefix", prefix)
        if not isinstance(index, Index):
            check_path("index", index)
        if wording is not None and not isinstance(wording, Wording):
            raise errors.InvalidInputError(
                "wording", got=repr(wording)[:60], expected="a Wording, or None"
            )
        of_model = {
            "kv": kv,
            "library_bytes": library_bytes,
            "repair": repair,
            "blend": blend,
            "attention_heads": attention_heads,
            "generate_options": generate_options,
        }
        is_of_model = any(each is not None for each in of_model.values())
        if (model is None) == (generate is None) or (generate is not None and is_of_model):
            answers = {"model": model, "generate": generate, **of_model}
            got = [name for name, each in answers.items() if each is not None]
            raise errors.InvalidInputError(
                "Rag: what answers",
                got=" and ".join(got) or "neither a model nor a function",
                expected="a model with its tokenizer and what belongs to it, or generate alone",
                fix="Rag(index, model, tokenizer), or Rag(index, generate=function)",
            )
        self._wording, self._passage_tokens = wording or Wording(), passage_tokens
        self._process, self._is_closed = os.getpid(), False
        # `_changed` guards what follows it, and is never held while anything is waited for
        self._turn, self._changed = threading.Lock(), threading.Condition()
        self._under_way = 0
        self._executor: ThreadPoolExecutor | None = None
        words = (self._wording, prefix, max_new_tokens)
        with ExitStack() as opened:
            self._generator: Generator = (
                FunctionGenerator(generate, tokenizer, *words)
                if generate is not None
                else ModelGenerator(
                    model,
                    tokenizer,
                    *words,
                    kv=kv,
                    library_bytes=library_bytes,
                    repair=repair,
                    blend=blend,
                    attention_heads=attention_heads,
                    options=generate_options,
                )
            )
            opened.callback(self._generator.close)
            self._takes_turns = generate is None
            self._prompt_tokens = _budget(self._generator, prompt_tokens)
            self.index: Index = (
                index if isinstance(index, Index) else opened.enter_context(Index(index, encoder))
            )
            self._opened = opened.pop_all()

    @property
    def frame_ids(self) -> tuple[int, ...]:
        """Token ids before the first passage: the prefix of a `PassageKV` for `kv`. Raises
        InvalidInputError where a function generates."""
        if not isinstance(self._generator, ModelGenerator):
            raise errors.InvalidInputError(
                "frame_ids", got="generate=", expected="a model", fix="Rag(index, model, tokenizer)"
            )
        return tuple(ids_of(self._generator.frame.head))

    @suggests_keywords
    def ask(
        self,
        question: str,
        k: int = 5,
        *,
        search: SearchKeywords | None = None,
        deadline_s: float | None = None,
    ) -> Answer:
        """Finds passages, answers from them, and says what the answer stands on.

        Args:
            question: any text; markers and a model's own signs in it are read as letters.
            k: passages wanted; 0: none is looked for, and the model answers by itself.
            search: options of `Index.search`, such as ``{"first_stage": ("bm25", "ivf")}``.
            deadline_s: for all of it; None: none. A function that generates is not interrupted.

        Raises:
            InvalidInputError: an argument is out of range, or the question does not fit into the
                prompt's tokens.
            DeadlineExceededError: nothing is answered from half of the work.
            EngineClosedError: it is closed.
            What searching and the model raise.
        """
        check_asked(question, k, deadline_s)
        return self._ask(question, k, search_of(search, k), Stop(deadline_s))

    @suggests_keywords
    async def aask(
        self,
        question: str,
        k: int = 5,
        *,
        search: SearchKeywords | None = None,
        deadline_s: float | None = None,
    ) -> Answer:
        """`ask`, in a thread: the event loop goes on meanwhile. Cancelled, the answer is given up
        after the step that is under way (a search, a token of a model, a call of a function)."""
        check_asked(question, k, deadline_s)
        options, stop = search_of(search, k), Stop(deadline_s)
        with self._changed:
            self._check_open()
            if self._executor is None:
                self._executor = ThreadPoolExecutor(_TOGETHER, "espnx-rag")
            future = self._executor.submit(self._ask, question, k, options, stop)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            stop.cancel()
            raise

    def _ask(self, question: str, k: int, search: SearchKeywords, stop: Stop) -> Answer:
        generator = self._generator
        early = EarlyPassages(
            generator.start_reads,
            generator.counter,
            self._passage_tokens,
            search.get("on_candidates"),
        )
        with self._used(), early:
            return self._answer(question, k, search, stop, early)

    @contextmanager
    def _used(self) -> Iterator[None]:
        """It is not closed meanwhile. Raises EngineClosedError."""
        with self._changed:
            self._check_open()
            self._under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def _prompt(self, question: str, hits: Sequence[Hit]) -> Prompt:
        generator = self._generator
        return make_prompt(
            generator.counter,
            generator.frame,
            question,
            hits,
            tokens=self._prompt_tokens,
            passage_tokens=self._passage_tokens,
        )

    def _answer(
        self, question: str, k: int, search: SearchKeywords, stop: Stop, early: EarlyPassages
    ) -> Answer:
        timings, begun = AnswerTimings(), time.perf_counter()
        stop.check()
        options = dict(search) | ({} if early.told is None else {"on_candidates": early.told})
        hits = self._hits(question, k, options, stop)
        at = time.perf_counter()
        timings.retrieval_s = at - begun
        prompt = self._prompt(question, hits)
        timings.prompt_s, at = time.perf_counter() - at, time.perf_counter()
        if k and not prompt.references and all(each.why == "empty" for each in prompt.left_out):
            timings.total_s = time.perf_counter() - begun
            return Answer(
                question,
                self._wording.nothing_found,
                nothing_found=True,
                left_out=prompt.left_out,
                timings=timings,
            )
        made = self._generate(prompt, stop, timings, early.finish())
        at = time.perf_counter()
        marked = parse(made.text.strip(), len(prompt.references))
        references = self._with_evidence(prompt, made, marked)
        stop.check()
        timings.support_s = time.perf_counter() - at
        timings.total_s = time.perf_counter() - begun
        return Answer(
            question=question,
            text=marked.text,
            references=references,
            unknown_references=marked.unknown,
            left_out=prompt.left_out,
            prompt_tokens=prompt.size,
            answer_tokens=made.tokens,
            is_unfinished=made.is_unfinished,
            attention_heads=made.attention_heads,
            reused=made.reused,
            timings=timings,
        )

    def _hits(self, question: str, k: int, options: dict[str, Any], stop: Stop) -> list[Hit]:
        if not k:
            return []
        given_s: Any = options.pop("deadline_s", _READ_DEADLINE_S)
        left_s = stop.left_s(given_s) if isinstance(given_s, int | float) else given_s
        stop.check()  # a search is not asked for in no time
        return self.index.search(question, k, deadline_s=left_s, **options).hits

    def _generate(
        self, prompt: Prompt, stop: Stop, timings: AnswerTimings, prefetch: Prefetch | None
    ) -> Generated:
        begun = time.perf_counter()
        if self._takes_turns:
            stop.take(self._turn)
        try:
            at = time.perf_counter()
            timings.waited_s = at - begun
            made = self._generator.generate(prompt, stop, prefetch)
        finally:
            if self._takes_turns:
                self._turn.release()
        timings.generate_s = time.perf_counter() - at
        timings.first_token_s = made.first_token_s
        return made

    def _with_evidence(
        self, prompt: Prompt, made: Generated, marked: MarkedText
    ) -> tuple[Reference, ...]:
        cited = {number for marker in marked.markers for number in marker.numbers}
        encoder = self.index.encoder if cited else None
        found = (
            supports(encoder, cited_sentences(marked), prompt.references)
            if encoder is not None
            else {}
        )
        return tuple(
            replace(
                each,
                is_cited=each.number in cited,
                support=found.get(each.number, ()),
                attention=None if made.attention is None else made.attention[each.number - 1],
            )
            for each in prompt.references
        )

    @suggests_keywords
    def calibrate(
        self,
        questions: Sequence[KnownSource] | None = None,
        *,
        count: int = 64,
        k: int = 5,
        line: PlantedLine | None = None,
        seed: int = 0,
        search: SearchKeywords | None = None,
        deadline_s: float | None = None,
    ) -> AttentionHeads:
        """Chooses the heads whose attention names sources, for this model; it is reported from then
        on, and kept beside the passages (`kv`), for every `Rag` over the same model and directory.

        Half of the questions choose, the other half say how often the heads are right: where that
        is no more than chance, they are not kept. Nothing of what is read for the questions stays
        in the library.

        Args:
            questions: whose source is known. Those whose source is not found, or has no room in the
                prompt, do not count. None: made-up ones, about lines that are planted in passages
                of the index.
            count: made-up questions.
            k: passages in the prompt of each.
            line: how planted lines read, and how they are asked for.
            seed: of what is made up.
            search: as of `ask`, for `questions`.
            deadline_s: for all of it.

        Raises:
            StateError: there is no `kv`, or a function generates.
            InvalidInputError: an argument is out of range, or fewer than two questions count.
            WriteError: the heads cannot be kept.
            What `ask` raises.
        """
        check_count("count", count, 2)
        check_whole("k", k, 2, 64)
        check_whole("seed", seed, 0)
        check_deadline(deadline_s)
        if line is not None and not isinstance(line, PlantedLine):
            raise errors.InvalidInputError(
                "line",
                got=repr(line)[:60],
                expected="a PlantedLine, or None",
                fix="PlantedLine(line=..., question=..., answer=...)",
            )
        known, options = questions, search_of(search, k)
        if known is not None:
            known = known_sources(known)
        stop = Stop(deadline_s)
        with self._watched(stop) as generator:
            with generator.aside():
                asked = (
                    self._made_up(count, k, line or PlantedLine(), seed)
                    if known is None
                    else self._known(known, k, options, stop)
                )
                shares, sources = list[torch.Tensor](), list[int]()
                for each in asked:
                    if each is not None:
                        prompt, answer, source = each
                        stop.check()
                        shares.append(generator.shares(prompt, answer, stop))
                        sources.append(source)
            found = chosen(shares, sources)
            if found.right > found.chance:
                generator.use(found)
            return found

    @suggests_keywords
    def judge(
        self,
        questions: Sequence[KnownSource],
        k: int = 5,
        *,
        search: SearchKeywords | None = None,
        deadline_s: float | None = None,
    ) -> tuple[bool | None, ...]:
        """Whether the attention that is reported names the sources of questions whose source is
        known: how far to trust it. Passages are read from `kv`, or computed for it and kept.

        Args:
            questions: others than `calibrate` has chosen by.
            k, search, deadline_s: as of `ask`.

        Returns:
            Of each question whether its source got more attention than any other passage of its
            prompt; None: it did not stand there beside another.

        Raises:
            StateError: there is no `kv`, or a function generates.
            InvalidInputError: an argument is out of range.
            What `ask` raises.
        """
        check_whole("k", k, 2, 64)
        check_deadline(deadline_s)
        asked, options = known_sources(questions), search_of(search, k)
        stop, found = Stop(deadline_s), list[bool | None]()
        with self._watched(stop) as generator:
            for known in self._known(asked, k, options, stop):
                stop.check()
                if known is None:
                    found.append(None)
                    continue
                prompt, answer, source = known
                shares = generator.shares(prompt, answer, stop)
                found.append(bool(is_named(shares, source, generator.heads)))
        return tuple(found)

    @contextmanager
    def _watched(self, stop: Stop) -> Iterator[ModelGenerator]:
        """A model whose attention is looked at, for oneself. Raises StateError where there is
        none."""
        generator = self._generator
        if not isinstance(generator, ModelGenerator):
            raise errors.StateError(
                "attention of passages", got="generate=", expected="a model", fix="Rag(kv=...)"
            )
        with self._used():
            stop.take(self._turn)
            try:
                yield generator
            finally:
                self._turn.release()

    def _made_up(
        self, count: int, k: int, line: PlantedLine, seed: int
    ) -> Iterator[tuple[Prompt, str, int]]:
        """(prompt, answer, which source it comes from) of questions about planted lines."""
        rng = random.Random(seed)
        ids = list(itertools.islice(self.index.ids(), _LOOKED_AT))
        texts = [text or "" for text in self.index.get(ids)]
        counter = self._generator.counter
        room = self._prompt_tokens // (2 * k)
        size = max(min(self._passage_tokens, room) - _LINE_TOKENS, 1)
        pool = [counter.data(text[: 64 * size]).cut(size).text for text in pool_of(texts, k, rng)]
        made = planted(pool, line, rng)
        for _ in range(count):
            numbers = rng.sample(range(len(pool)), min(k, len(pool)))
            source = rng.randrange(len(numbers))
            name, value = made.names[numbers[source]], made.values[numbers[source]]
            hits = [Hit(n, 0.0, made.texts[n], n, False) for n in numbers]
            found = self._prompt(line.filled(line.question, name, value), hits)
            if source < len(found.references):
                yield found, line.filled(line.answer, name, value), source

    def _known(
        self, questions: Sequence[KnownSource], k: int, search: SearchKeywords, stop: Stop
    ) -> Iterator[tuple[Prompt, str | None, int] | None]:
        """The same of questions whose source is known; None: it does not stand in the prompt beside
        another."""
        for each in questions:
            found = self._prompt(each.question, self._hits(each.question, k, dict(search), stop))
            numbers = [i for i, one in enumerate(found.references) if one.passage == each.passage]
            is_there = numbers and len(found.references) > 1
            yield (found, each.answer, numbers[0]) if is_there else None

    def check(self, answer: Answer) -> dict[int, str]:
        """What has become of an answer's sources since: by number ``unchanged``, ``changed`` or
        ``deleted``, in the version of the index that is open (`Index.reload` takes the newest).

        Raises InvalidInputError, and what reading texts raises.
        """
        if not isinstance(answer, Answer):
            raise errors.InvalidInputError(
                "answer", got=repr(answer)[:60], expected="an Answer, as `ask` returns it"
            )
        self._check_open()
        texts = self.index.get([each.passage for each in answer.references])
        return {
            each.number: "deleted"
            if text is None
            else "unchanged"
            if fingerprint(text) == each.fingerprint
            else "changed"
            for each, text in zip(answer.references, texts, strict=True)
        }

    def _check_open(self) -> None:
        check_own(self._process, "the Rag", "make it after fork()")
        if self._is_closed:
            raise errors.EngineClosedError("the Rag is closed", fix="make it again")

    def close(self) -> None:
        """Answers under way are finished first; then what was opened here is closed. In a child
        after fork() nothing is done."""
        if os.getpid() != self._process:
            return
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: not self._under_way)
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True)
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Rag over {self.index!r}{', closed' if self._is_closed else ''}>"


def _budget(generator: Generator, prompt_tokens: int | None) -> int:
    """Tokens of a prompt. Raises InvalidInputError where prompt and answer do not fit the model."""
    positions = generator.positions
    if positions is None:
        return _PROMPT_TOKENS if prompt_tokens is None else prompt_tokens
    most = positions - generator.max_new_tokens
    wanted = most if prompt_tokens is None else prompt_tokens
    if not 1 <= wanted <= most:
        raise errors.InvalidInputError(
            "prompt_tokens and max_new_tokens",
            got=f"{max(wanted, 1)} + {generator.max_new_tokens}",
            expected=f"at most the model's {positions} positions",
            fix="fewer of one of them",
        )
    return wanted
