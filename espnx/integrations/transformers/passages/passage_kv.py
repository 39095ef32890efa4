"""`PassageKV`: K and V of passages in a library on SSD, and prompts that are composed of them."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
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
from ....kv.passages.context import Context, Passage
from ....kv.passages.early import EarlyReads
from ....kv.passages.extent import Extent, Identity, Rows
from ....kv.passages.library import ExtentWriter, Library, data_name
from ....kv.places import Places
from ....kv.striping import Storage, directories_of
from ....sizes import parse_size
from ....suggestions import suggests_keywords
from ..cache import KVCache
from ..cache_argument import CACHE_NAMES, cache_name
from ..enable import enable_kv_cache
from ..identity import fingerprint as fingerprints
from ..identity.watch import Watch
from .anew import check_anew, compute_anew, deviating_tokens, first_tokens
from .arguments import check_key, check_options, words_of
from .cache import PassageCache
from .loss import PassageLoss
from .prefetch import PassagePrefetch
from .prompts import MODES, Ids, Prompts, check_ids, passages_of, prompts_of
from .rotary import rotary_rows

log = logging.getLogger(__name__)

#: Passages are computed by so many tokens at a time, in whole blocks.
_CHUNK_TOKENS = 1024
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
        self._vocabulary = words_of(model)
        self._prefix = check_ids("prefix", prefix, self._vocabulary)
        self._tokenizer = None if tokenizer is None else _tokenizer_digest(tokenizer)
        if model.training:
            raise errors.InvalidInputError(
                "passages of a model", got="a model in training mode", fix="model.eval()"
            )
        self.model = enable_kv_cache(model)
        self._lock, self._kind = threading.RLock(), fingerprint
        self._rows = rotary_rows(model)
        self._heads = int(model.config.get_text_config(decoder=True).num_attention_heads)
        self._cost = partial(_flops, sum(each.numel() for each in model.base_model.parameters()))
        self._idle: list[Places] = []
        self._caches = weakref.WeakSet[PassageCache]()
        self._prefetches = weakref.WeakSet[PassagePrefetch]()
        self._is_closed = False
        self._limit_bytes = limit_bytes
        self._open_library()

    def _open_library(self) -> None:
        """Opens the library for the model as it is now."""
        self._watch = Watch(self.model.base_model)
        made_by = fingerprints.fingerprint(self.model, self._kind)
        said = {"model": made_by, "rows": self._rows.shape.describe(), "tokenizer": self._tokenizer}
        space = hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).digest()
        engine = self._options.engine
        self._library = Library(
            self.directories,
            space,
            {"model": made_by["model"], "rows": said["rows"]},
            self._rows.shape,
            limit_bytes=self._limit_bytes,
            engine=os.fspath(engine) if isinstance(engine, os.PathLike) else engine,
            deadline_s=self._options.deadline_s,
        )

    def _check(self) -> None:
        """Raises EngineClosedError, InvalidInputError after a fork. A model whose weights have
        changed has other passages from here on."""
        check_own(self._process, "the library of passages")
        if self._is_closed:
            raise errors.EngineClosedError("the library of passages is closed")
        if not self._watch.is_unchanged():
            log.warning("the model has changed since its passages were computed: others are used")
            self._close_caches()
            self._library.close()
            self._rows = rotary_rows(self.model)
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
        ids = check_ids("token_ids", token_ids, self._vocabulary)
        if key is not None:
            check_key(key)
        with self._lock:
            self._check()
            texts = [each for each in (self._prefix, ids) if each.size]
            self._check_length(sum(map(len, texts)))
            identity = Identity.of(self._library.space, [], ids)
            key = identity.text.hex()[:32] if key is None else key
            self._library.name(key, ids)
            if ids.size:
                prompt = self._prompts("prefix", [[ids]])
                try:
                    self._fill(prompt, for_use=False)
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
            if self._is_closed or early.library is not self._library:
                return False
            found = [self._library.named(each) if isinstance(each, str) else each for each in texts]
            prompt = self._prompts("blocks", [[ids for ids in found if ids is not None]])
            wanted = [
                (identity, ids)
                for identity, ids in zip(prompt.identities, prompt.texts, strict=True)
                if ids.size
            ]
            early.only({identity for identity, _ in wanted})
            there = self._library.find(wanted, known=early.extents, is_use=False)
            early.want([each for each in there if each is not None])
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
        check_options(self._own_rows | options)
        early = None if prefetch is None else prefetch.take()
        with self._lock:
            try:
                self._check()
                prompt = self._prompts(mode, [[self._ids_of(x) for x in each] for each in every])
                prompt.check = check or prompt.check
                self._check_length(prompt.ids()[0].shape[1])
                if early is not None and early.library is not self._library:
                    early.close()
                    early = None
                try:
                    self._fill(prompt, known=early)
                    cache = self._cache(prompt, early=early, first=blend is not None, **options)
                except BaseException:
                    self._library.leave(prompt.pins)
                    raise
            except BaseException:
                if early is not None:
                    early.close()
                raise
            try:
                self._compute_anew(cache, prompt, repair, blend)
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
        asked = check_ids("question", question, self._vocabulary)
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
            lossy, reused = self._next_words(cache, asked), cache.reused
            given = cache.prompt(torch.empty(1, 0, dtype=torch.int64))["input_ids"][0].numpy()
        with KVCache(self.model.config, self.directories, **self._own_rows) as whole:
            for begin in range(0, len(given), self._chunk_tokens):
                self._pass(whole, given[begin : begin + self._chunk_tokens])
            exact = self._next_words(whole, asked)
        return PassageLoss.of(exact, lossy, reused["repaired"] / max(reused["tokens"], 1))

    def _next_words(self, cache: KVCache, ids: np.ndarray) -> torch.Tensor:
        """Log-probabilities float64 [n, words] behind each of these tokens."""
        given = torch.from_numpy(ids.astype(np.int64))[None].to(self._device)
        name = cache_name(inspect.signature(self.model.forward).parameters) or CACHE_NAMES[-1]
        with torch.no_grad():
            logits = self.model(input_ids=given, use_cache=True, **{name: cache}).logits
        return logits[0].double().log_softmax(dim=-1).cpu()

    def _checked(self, passage: str | Ids) -> str | np.ndarray:
        """A name, or token ids int32 [n]. Raises InvalidInputError."""
        if isinstance(passage, str):
            check_key(passage)
            return passage
        return check_ids("a passage", passage, self._vocabulary)

    def _ids_of(self, passage: str | np.ndarray) -> np.ndarray:
        if not isinstance(passage, str):
            return passage
        found = self._library.named(passage)
        if found is None:
            raise _unknown(passage)
        return found

    def _check_length(self, tokens: int) -> None:
        config = self.model.config.get_text_config(decoder=True)
        most = getattr(config, "max_position_embeddings", None)
        if most is not None and tokens >= most:
            raise errors.InvalidInputError(
                "passages and their prefix",
                got=f"{tokens} tokens",
                expected=f"fewer than the model's {most} positions",
                fix="fewer passages, or shorter ones",
            )

    def _prompts(self, mode: str, every: Sequence[Sequence[np.ndarray]]) -> Prompts:
        return Prompts.made(mode, self._library.space, self._prefix, every)

    def _fill(
        self, prompt: Prompts, *, for_use: bool = True, known: EarlyReads | None = None
    ) -> None:
        """Finds the passages of prompts, and computes those that are not there, each once.
        `for_use`: where there is no room for one, it is computed all the same."""
        wanted = [
            (identity, ids)
            for identity, ids in zip(prompt.identities, prompt.texts, strict=True)
            if ids.size
        ]
        damaged = len(self._library.damaged)
        there = iter(self._library.find(wanted, known=known.extents if known else None))
        found = [next(there) if ids.size else None for ids in prompt.texts]
        prompt.pins += [each for each in found if each is not None]
        prompt.reused["damaged"] += len(self._library.damaged) - damaged
        if known is not None:
            known.keep([each.number for each in prompt.pins])
        made = dict[Identity, Passage]()
        for number, (ids, extent) in enumerate(zip(prompt.texts, found, strict=True)):
            identity, is_last = prompt.identities[number], number == len(found) - 1
            if extent is not None:
                made[identity] = Passage(len(ids), 0, extent)
            if identity in made or not ids.size:
                prompt.reused["reused"] += len(ids)
            else:
                made[identity] = self._compute(prompt, number, must=for_use or not is_last)
                prompt.reused["computed"] += len(ids)
            like = made.get(identity, Passage(0, 0))
            prompt.passages.append(
                Passage(
                    len(ids),
                    prompt.offset(number) if ids.size else 0,
                    like.extent,
                    like.rows,
                    prompt.place(number) >= prompt.n_prefix,
                    prompt.of[number],
                )
            )

    # --- computing ---

    def _compute(self, prompt: Prompts, number: int, *, must: bool = True) -> Passage:
        """Computes one passage behind what stands before it, into the library, or where there is no
        room into memory. `must`: False: nothing is computed then."""
        ids, identity = prompt.texts[number], prompt.identities[number]
        cost = self._cost(self._rows.shape.layers, self._heads, self._rows.shape.layout, identity)
        try:
            to = self._library.write(identity, ids, cost)
        except errors.DiskFullError as error:
            log.warning("no room for a passage of %d tokens: %s", len(ids), error)
            to = None
        if isinstance(to, Extent):
            prompt.pins.append(to)
            return Passage(len(ids), 0, to)
        if isinstance(to, ExtentWriter):
            with to:
                self._run(prompt, number, to.rows)
                extent = to.finish()
            prompt.pins.append(extent)
            return Passage(len(ids), 0, extent)
        prompt.reused["uncached"] += len(ids)
        if not must:
            return Passage(len(ids), 0)
        log.info("a passage of %d tokens stays in memory: the library is full", len(ids))
        parts: list[list[Rows]] = [[] for _ in range(self._rows.shape.layers)]
        self._run(
            prompt,
            number,
            lambda layer, k, v: parts[layer].append((k.detach().clone(), v.detach().clone())),
        )
        return Passage(len(ids), 0, None, [_joined(each) for each in parts])

    def _run(
        self, prompt: Prompts, number: int, tap: Callable[[int, torch.Tensor, torch.Tensor], None]
    ) -> None:
        """Runs the model over a text behind others, and gives each layer's rows to `tap`."""
        before, ids, chunk = prompt.before(number), prompt.texts[number], self._chunk_tokens
        inner = Prompts(
            prompt.mode,
            prompt.n_prefix,
            [prompt.texts[i] for i in before],
            [0] * len(before),
            [prompt.identities[i] for i in before],
            [replace(prompt.passages[i], is_counted=False, text=0) for i in before],
            reused=prompt.reused,
        )
        with self._cache(inner, tap=tap, keeps=len(ids) > chunk) as cache:
            for begin in range(0, len(ids), chunk):
                prompt.check()
                self._pass(cache, ids[begin : begin + chunk])

    def _pass(self, cache: KVCache, ids: np.ndarray, positions: torch.Tensor | None = None) -> None:
        """Runs the model's body over tokens int32 [n], at positions int64 [n]; None: behind what is
        in the cache."""
        body, device = self.model.base_model, self._device
        name = cache_name(inspect.signature(body.forward).parameters) or CACHE_NAMES[-1]
        given = {"input_ids": torch.from_numpy(ids.astype(np.int64))[None].to(device)}
        if positions is not None:
            given["position_ids"] = positions[None].to(device)
        with torch.no_grad():
            body(**given, use_cache=True, **{name: cache})

    def _compute_anew(
        self, cache: PassageCache, prompt: Prompts, repair: int | None, blend: float | None
    ) -> None:
        """Computes tokens of passages anew at their place, as `compose` says."""
        store, chunk = cache.store, self._chunk_tokens

        def run(cache: PassageCache, ids: np.ndarray, positions: torch.Tensor) -> None:
            prompt.check()
            self._pass(cache, ids, positions)

        if repair is not None:
            chosen = first_tokens(prompt, repair)
        elif blend is not None:
            chosen = deviating_tokens(
                cache,
                prompt,
                blend,
                run,
                partial(self._layer_rows, prompt, store.context, 1),
                self._rows.rotations[min(1, len(self._rows.rotations) - 1)],
                chunk,
            )
            store.context.layers = self._rows.shape.layers
        else:
            return
        compute_anew(cache, prompt, chosen, run, chunk)
        cache.forget_text()

    def _layer_rows(self, prompt: Prompts, context: Context, layer: int, number: int) -> Rows:
        """A layer's rows of a passage of a prompt, as they are kept."""
        passage = context.passages[number]
        if passage.extent is not None:
            try:
                return self._library.rows(passage.extent, layer)
            except (errors.ChecksumError, errors.ReadError, errors.TruncatedFileError) as error:
                context.renew_passage(number, error)
                return self._layer_rows(prompt, context, layer, number)
        if passage.rows is None:
            raise errors.StateError("a passage without rows", got=number)
        return passage.rows[layer]

    @property
    def _chunk_tokens(self) -> int:
        block = self._rows.shape.layout.block_rows
        return max(_CHUNK_TOKENS // block, 1) * block

    @property
    def _device(self) -> torch.device:
        return next(
            (each.device for each in self.model.parameters() if not each.is_meta),
            torch.device("cpu"),
        )

    # --- caches ---

    def _cache(
        self,
        prompt: Prompts,
        *,
        early: EarlyReads | None = None,
        first: bool = False,
        **options: Any,
    ) -> PassageCache:
        """The cache of prompts whose passages are there. It takes their pins with it, and reads
        that began early. `first`: only the first layer is asked for to begin with."""
        places = self._opened() if any(each.extent for each in prompt.passages) else None
        try:
            context = Context(
                self._rows.shape,
                prompt.passages,
                self._rows.rotations,
                () if places is None else places.striped.devices,
                self._options.threads or 0,
                early,
                prompt.count,
            )
            context.layers = 1 if first else context.layers
            prompt.passages = context.passages
            context.renew = partial(self._renew, prompt)
            cache = PassageCache(
                self.model.config,
                self.directories,
                context,
                *prompt.ids(),
                prompt.reused,
                release=partial(
                    _release, weakref.ref(self), context, places, self._library, prompt.pins
                ),
                **self._own_rows | options,
            )
        except BaseException:
            if places is not None:
                places.close()
            raise
        self._caches.add(cache)
        return cache

    @property
    def _own_rows(self) -> dict[str, Any]:
        """Options of the cache of what comes behind passages."""
        names = ("engine", "device", "compute", "threads", "deadline_s")
        return {name: getattr(self._options, name) for name in names}

    def _opened(self) -> Places:
        """The data files, open for one cache."""
        if self._idle:
            return self._idle.pop()
        names = [data_name(number) for number in range(len(self.directories))]
        places = Places(self.directories, self._options, names)
        try:
            places.open(self._device)
        except BaseException:
            places.close()
            raise
        return places

    def _renew(self, prompt: Prompts, number: int, error: errors.StorageError) -> Passage:
        """Computes a passage anew that was found damaged while it was attended to. Where that
        cannot be, it is not found any more, and the error is raised."""
        extent = prompt.passages[number].extent
        if extent is None or self._is_closed:
            raise error
        with self._lock:
            self._library.damage(extent, error.offset_bytes or 0, error.size_bytes or 0)
            prompt.reused["damaged"] += 1
            if _is_streamed(self.model):
                raise error
            log.warning("a passage is damaged, and computed anew: %s", error)
            made = self._compute(prompt, number)
            prompt.reused["computed"] += made.tokens
            prompt.reused["reused"] -= made.tokens
        return made

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
        with self._lock:
            if self._is_closed:
                return
            self._close_caches()
            self._is_closed = True
            while self._idle:
                self._idle.pop().close()
            self._library.close()

    def _close_caches(self) -> None:
        for prefetch in list(self._prefetches):
            prefetch.early.close()
        for cache in list(self._caches):
            cache.close()

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
        return (
            f"<PassageKV in {', '.join(self.directories)}{', closed' if self._is_closed else ''}>"
        )


def _release(
    owner: weakref.ref[PassageKV],
    context: Context,
    places: Places | None,
    library: Library,
    pins: list[Extent],
) -> None:
    """The end of a cache: its devices may serve the next one."""
    context.close()
    mine = owner()
    if places is not None:
        if mine is not None and not mine._is_closed and not mine._idle:
            mine._idle.append(places)
        else:
            places.close()
    library.leave(pins)
    pins.clear()


def _joined(parts: Sequence[Rows]) -> Rows:
    """Rows that came some tokens at a time."""
    k, v = (torch.cat([each[i] for each in parts], dim=2).contiguous() for i in (0, 1))
    return k, v


def _flops(parameters: int, layers: int, heads: int, layout: Any, identity: Identity) -> float:
    """Floating-point operations that computing a passage takes: of its weights, and of attention
    over what stands before each token."""
    seen = identity.tokens * (identity.first_position + identity.tokens / 2)
    attention = 2.0 * layers * heads * (layout.d + layout.dv) * seen
    return 2.0 * parameters * identity.tokens + attention


def _is_streamed(model: torch.nn.Module) -> bool:
    """Whether layers come from disk as they are run: a pass inside another would take them away."""
    return any(hasattr(module, "espnx_streamed") for module in model.modules())


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
