"""`PassageKV`: K and V of passages in a library on SSD, and prompts that are composed of them."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch
from transformers import PreTrainedModel

from .... import errors
from ....checks import check_callable, check_whole
from ....device.interface import READ_AHEAD_BYTES
from ....device.registry import Devices, check_device
from ....forks import check_own
from ....kv.options import CacheOptions
from ....kv.passages.early import EarlyReads
from ....kv.passages.extent import Identity
from ....kv.passages.library import Library
from ....kv.striping import Storage, directories_of
from ....sizes import parse_size
from ....suggestions import suggests_keywords
from ..cache import KVCache
from ..identity import fingerprint as fingerprints
from ..identity.watch import Watch
from .anew import check_anew
from .arguments import check_key, check_options, words_of
from .cache import PassageCache
from .filling import Filling
from .loss import PassageLoss
from .model import PassageModel
from .open_caches import OpenCaches
from .prefetch import PassagePrefetch
from .prompts import MODES, Ids, Prompts, check_ids, passages_of, prompts_of

log = logging.getLogger(__name__)

#: What is read at most of passages that a prompt may have.
PREFETCH_BYTES = 64 << 20


class PassageKV:
    """K and V of passages, each computed once and read from SSD wherever it stands in a prompt. A
    context manager.

    A library holds passages of any models and prefixes side by side, which never meet: an extent is
    found by the model's fingerprint, the tokens before it and its own. Several processes may use
    and fill one. Nothing in it is changed once it is written, so that prompts share it.

    Args:
        model: a decoder with rotary positions in full attention; `enable_kv_cache` is called.
        directory: on the SSD, or one on each of several, in the same order each time; made where
            it is missing. Its files are readable by nobody else: rows can be turned back into text.
        prefix: token ids that stand before every passage, such as a system prompt (with the token
            that begins a text, if the model has one). Its rows are kept, too.
        tokenizer: counts for what an extent is found by, if given: token ids of another are other
            texts.
        library_bytes: the data files together do not grow beyond this size (``200GiB``): what
            costs least to compute again for its bytes and its uses is evicted, and what does not
            fit all the same is computed for each prompt. What is beside the rows counts, too:
            blocks that are not full (at most an eighth), and the front, whole pages of 4 KiB
            (`stats`). None: as far as the disk goes.
        fingerprint: of the model: ``whole``, or ``sampled``, as of `KVCache`.
        engine, device, compute, threads, deadline_s: as of `KVCache`; a device must keep its rows.
        read_ahead_bytes: of passages' rows read before they are asked for.

    Raises:
        InvalidInputError: the model's rows cannot stand elsewhere (see `rotary`): named.
        FormatError: the library's index is damaged.
        WriteError, DiskFullError, StoreBusyError.
    """

    @suggests_keywords
    def __init__(
        self,
        model: PreTrainedModel,
        directory: Storage,
        *,
        prefix: Ids = (),
        tokenizer: Any = None,
        library_bytes: int | str | None = None,
        fingerprint: str = "whole",
        engine: str | os.PathLike[str] | Callable[[], Any] = "auto",
        device: Devices | None = None,
        compute: str | torch.device | None = None,
        threads: int | None = None,
        read_ahead_bytes: int | str = READ_AHEAD_BYTES,
        deadline_s: float = 30.0,
    ):
        self._options = CacheOptions(
            read_ahead_bytes=read_ahead_bytes,
            engine=engine,
            device=device,
            compute=compute,
            threads=threads,
            deadline_s=deadline_s,
        )
        if fingerprint not in fingerprints.KINDS:
            raise errors.InvalidInputError(
                "fingerprint", got=repr(fingerprint), expected=" or ".join(fingerprints.KINDS)
            )
        limit_bytes = None if library_bytes is None else parse_size(library_bytes)
        if device is not None:
            check_device(device)
        self.directories, self._process = directories_of(directory), os.getpid()
        self._prefix = check_ids("prefix", prefix, words_of(model))
        self._tokenizer = None if tokenizer is None else _tokenizer_digest(tokenizer)
        self._model = PassageModel(model)
        self.model = self._model.module
        self._lock, self._kind, self._limit_bytes = threading.RLock(), fingerprint, limit_bytes
        self._caches = OpenCaches(self._model, self.directories, self._options)
        self._prefetches = weakref.WeakSet[PassagePrefetch]()
        self._open_library()

    def _open_library(self) -> None:
        """Opens the library for the model as it is now."""
        self._watch = Watch(self.model.base_model)
        made_by, shape = fingerprints.fingerprint(self.model, self._kind), self._model.rows.shape
        said = {"model": made_by, "rows": shape.describe(), "tokenizer": self._tokenizer}
        space = hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).digest()
        engine = self._options.engine
        self._library = Library(
            self.directories,
            space,
            {"model": made_by["model"], "rows": said["rows"]},
            shape,
            limit_bytes=self._limit_bytes,
            engine=os.fspath(engine) if isinstance(engine, os.PathLike) else engine,
            deadline_s=self._options.deadline_s,
        )
        self._filling = Filling(self._model, self._library, self._caches, self._lock)

    def _check(self) -> None:
        """Raises EngineClosedError, InvalidInputError after a fork. A model whose weights have
        changed has other passages from here on."""
        check_own(self._process, "the library of passages")
        if self._caches.is_closed:
            raise errors.EngineClosedError("the library of passages is closed")
        if not self._watch.is_unchanged():
            log.warning("the model has changed since its passages were computed: others are used")
            self._end_prefetches()
            self._caches.close_all()
            self._library.close()
            self._model.look_again()
            self._open_library()

    # --- passages come and go ---

    def add(self, token_ids: Ids, key: str | None = None) -> str:
        """Computes a passage behind the prefix and keeps it, unless it is there. Who is interrupted
        adds again: nothing half written is ever found.

        Args:
            token_ids: of the passage alone, int [n]; none is an empty passage.
            key: its name, for `compose`; what had that name before is forgotten, if it was another
                text. None: one that the tokens give.

        Returns:
            The name.

        Raises:
            InvalidInputError: no token ids, or the passage does not fit behind the prefix.
            WriteError, ReadError, DeadlineExceededError.
        """
        ids = check_ids("token_ids", token_ids, self._model.vocabulary)
        if key is not None:
            check_key(key)
        with self._lock:
            self._check()
            texts = [each for each in (self._prefix, ids) if each.size]
            self._model.check_length(sum(map(len, texts)))
            identity = Identity.of(self._library.space, [], ids)
            key = identity.text.hex()[:32] if key is None else key
            self._library.name(key, ids)
            if ids.size:
                prompt = self._prompts("prefix", [[ids]])
                try:
                    self._filling.fill(prompt, for_use=False)
                finally:
                    self._library.leave(prompt.pins)
        return key

    def remove(self, key: str) -> None:
        """Forgets a name, and the passage, unless it has another one; prompts that are composed of
        it keep it until they are closed. Raises InvalidInputError for an unknown name."""
        check_key(key)
        with self._lock:
            self._check()
            if not self._library.remove(key):
                raise _unknown(key)

    def prefetch(
        self, passages: Sequence[str | Ids] = (), *, max_bytes: int | str = PREFETCH_BYTES
    ) -> PassagePrefetch:
        """Starts reading passages that a prompt may have, while it is being found out which ones
        it will have: the prefix and the first layers first. Nothing is computed, and nobody is
        waited for, but for a page or two in front of each passage.

        Args:
            passages: as of `compose` in mode ``blocks``, the likeliest first; `want` of what is
                returned says it again when more is known.
            max_bytes: of rows in memory at a time, a size (``64MiB``); all reads together take at
                most half as much again.

        Returns:
            The reads, for `compose(prefetch=)`, or to be cancelled.

        Raises InvalidInputError: these are no passages, or no size.
        """
        check_own(self._process, "the library of passages")
        given, most_bytes = passages_of(passages), parse_size(max_bytes)
        made = PassagePrefetch(EarlyReads(self._library, most_bytes), self._start_early)
        self._prefetches.add(made)
        made.want(given)
        return made

    def _start_early(self, early: EarlyReads, passages: Sequence[str | Ids]) -> bool:
        texts = [self._checked(each) for each in passages]
        if not self._lock.acquire(blocking=False):  # a prompt is being computed
            return False
        try:
            if self._caches.is_closed or early.library is not self._library or not early.is_open:
                return False
            found = [self._library.named(each) if isinstance(each, str) else each for each in texts]
            prompt = self._prompts("blocks", [[ids for ids in found if ids is not None]])
            wanted = [
                (identity, ids)
                for identity, ids in zip(prompt.identities, prompt.texts, strict=True)
                if ids.size
            ]
            early.only({identity for identity, _ in wanted})
            there = self._library.find(wanted, known=early.extents, is_use=False, begun=early.begun)
            early.want([each for each in there if each is not None])
        except errors.TransferCancelledError:
            if early.is_open:
                raise
            return False  # it has been closed meanwhile
        finally:
            self._lock.release()
        return True

    def compose(
        self,
        passages: Sequence[str | Ids] | Sequence[Sequence[str | Ids]],
        *,
        mode: str = "blocks",
        repair: int | None = None,
        blend: float | None = None,
        prefetch: PassagePrefetch | None = None,
        question_tokens: int | None = None,
        check: Callable[[], object] | None = None,
        **options: Any,
    ) -> PassageCache:
        """A cache that begins with the prefix and these passages, for `generate` or a forward pass
        (`past_key_values`) over what comes after them. Passages that are not in the library are
        computed and kept; of all others nothing is computed, and nothing is written.

        Args:
            passages: names that `add` returned, or token ids; in the order of the prompt. A passage
                may stand there twice. A list of such lists: a prompt for each, whose sequences are
                a batch; what several of them have is read once for all.
            mode: ``blocks``: each passage sees the prefix and itself, as it was computed; it stands
                at its place by rotation: exact by that definition, and another thing than full
                attention, which lets a passage see those before it. ``prefix``: what full attention
                computes: only rows that were computed behind the same tokens are used.
            repair: of ``blocks``: the first so many tokens of each passage are computed anew at
                their place, where they see all that stands before (EPIC, 2410.15332). Lossy, as
                `blend` is: `loss` says by how much.
            blend: of ``blocks``: the share of the passages' tokens that are computed anew, those
                whose K and V of layer 1 are farthest from what full attention gives (CacheBlend,
                2405.16444); 1: all of them, which is full attention. Finding them takes about a
                layer's part of computing all of them.
            prefetch: reads of them that began before; what this prompt does not need ends, and the
                rest is the prompt's.
            question_tokens: tokens of the first pass behind each prompt, those of all its sequences
                together: reads of the first layers begin at once, in portions that so many queries
                attend to at a time. None: they begin with `PassageCache.prompt`, which knows, or
                with the pass. Where more come, what was in line is read again: `read_ahead_bytes`
                at most.
            check: is called before each part of a passage that has to be computed; what it raises
                ends composing, and passages that are whole by then stay in the library.
            **options: of `KVCache`, for rows that come after the passages (`spill_interval`,
                `capacity_tokens`, ...), but for drafts.

        Raises:
            InvalidInputError: an unknown name or mode, more tokens than the model's positions,
                drafts, or several prompts with `repair` or `blend`.
            WriteError, ReadError, DeadlineExceededError.
        """
        every = [[self._checked(x) for x in each] for each in prompts_of(passages)]
        if not isinstance(mode, str) or mode not in MODES:
            raise errors.InvalidInputError("mode", got=repr(mode), expected=", ".join(MODES))
        check_anew(repair, blend, mode, len(every))
        if question_tokens is not None:
            check_whole("question_tokens", question_tokens, 1)
        if check is not None:
            check_callable("check", check)
        if prefetch is not None and not isinstance(prefetch, PassagePrefetch):
            raise errors.InvalidInputError(
                "prefetch", got=repr(prefetch)[:60], expected="what `prefetch` returned, or None"
            )
        check_options(self._caches.own_rows | options)
        early = None if prefetch is None else prefetch.take()
        with self._lock:
            try:
                self._check()
                prompt = self._prompts(mode, [[self._ids_of(x) for x in each] for each in every])
                prompt.check = check or prompt.check
                self._model.check_length(prompt.ids()[0].shape[1])
                if early is not None and early.library is not self._library:
                    early.close()
                    early = None
                try:
                    self._filling.fill(prompt, known=early)
                    cache = self._caches.make(
                        self._library,
                        prompt,
                        self._filling.renew,
                        early=early,
                        first=blend is not None,
                        **options,
                    )
                except BaseException:
                    self._library.leave(prompt.pins)
                    raise
            except BaseException:
                if early is not None:
                    early.close()
                raise
            try:
                self._filling.compute_anew(cache, prompt, repair, blend)
            except BaseException:
                cache.close()
                raise
            if question_tokens is not None:
                cache.begin(question_tokens)
            return cache

    def loss(self, passages: Sequence[str | Ids], question: Ids, **options: Any) -> PassageLoss:
        """What passages that are composed so lose against full attention over the same tokens,
        which is computed for it.

        Args:
            passages: of one prompt, as of `compose`.
            question: token ids behind them, at least one.
            **options: of `compose`, such as ``repair``.

        Raises InvalidInputError, and what `compose` and the model raise.
        """
        model = self._model
        asked = check_ids("question", question, self._model.vocabulary)
        prompts = prompts_of(passages)
        if len(prompts) != 1:
            raise errors.InvalidInputError(
                "passages of a loss",
                got=f"{len(prompts)} prompts",
                expected="one",
                fix="ask for each by itself",
            )
        if not asked.size:
            raise errors.InvalidInputError("question", got="no token", expected="1 or more")
        with self.compose(prompts[0], **options) as cache:
            lossy, reused = model.next_words(cache, asked), cache.reused
            given = cache.prompt(torch.empty(1, 0, dtype=torch.int64))["input_ids"][0].numpy()
        with KVCache(self.model.config, self.directories, **self._caches.own_rows) as whole:
            for begin in range(0, len(given), model.chunk_tokens):
                model.run(whole, given[begin : begin + model.chunk_tokens])
            exact = model.next_words(whole, asked)
        return PassageLoss.of(exact, lossy, reused["repaired"] / max(reused["tokens"], 1))

    def _checked(self, passage: str | Ids) -> str | np.ndarray:
        """A name, or token ids int32 [n]. Raises InvalidInputError."""
        if isinstance(passage, str):
            check_key(passage)
            return passage
        return check_ids("a passage", passage, self._model.vocabulary)

    def _ids_of(self, passage: str | np.ndarray) -> np.ndarray:
        if not isinstance(passage, str):
            return passage
        found = self._library.named(passage)
        if found is None:
            raise _unknown(passage)
        return found

    def _prompts(self, mode: str, every: Sequence[Sequence[np.ndarray]]) -> Prompts:
        return Prompts.made(mode, self._library.space, self._prefix, every)

    # --- the library ---

    def verify(self) -> dict[str, int]:
        """Reads every passage of this model, with any prefix, and checks it: ``bytes`` read,
        ``damaged`` passages, which are not found any more, and are computed anew when they are
        asked for."""
        with self._lock:
            self._check()
            read_bytes, damaged = self._library.verify()
        return {"bytes": read_bytes, "damaged": damaged}

    def stats(self) -> dict[str, int]:
        """``extents`` of all models and prefixes in the directories, ``stored_bytes`` of them, of
        which ``row_bytes`` are rows (the rest is checksums and what is empty), ``file_bytes``:
        where the last of them ends in each data file, together, ``damaged``: how many were found so
        far, ``late``: places that wait for writes which were given up at their deadline."""
        with self._lock:
            self._check()
            return self._library.stats()

    def close(self) -> None:
        """Closes the caches that are composed of passages, and the library. May be called again."""
        self._end_prefetches()  # one that waits for a read has the lock
        with self._lock:
            if self._caches.is_closed:
                return
            self._end_prefetches()
            self._caches.close()
            self._library.close()

    def _end_prefetches(self) -> None:
        for prefetch in list(self._prefetches):
            prefetch.early.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        closed = ", closed" if self._caches.is_closed else ""
        return f"<PassageKV in {', '.join(self.directories)}{closed}>"


def _tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 of what makes a tokenizer's ids. Raises InvalidInputError."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    made = getattr(backend or tokenizer, "to_str", None)
    if callable(made):
        said = made()
    elif callable(getattr(tokenizer, "get_vocab", None)):
        said = json.dumps(sorted(tokenizer.get_vocab().items()))
    else:
        raise errors.InvalidInputError(
            "tokenizer", got=type(tokenizer).__name__, expected="one of transformers or tokenizers"
        )
    return hashlib.sha256(said.encode()).hexdigest()


def _unknown(key: str) -> errors.InvalidInputError:
    return errors.InvalidInputError(
        "a passage", got=f"the name {key!r}", expected="one that `add` returned", fix="add it first"
    )
