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
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from transformers import PreTrainedModel

from .... import errors
from ....device.interface import READ_AHEAD_BYTES, RowDevice
from ....device.registry import Devices
from ....forks import check_own
from ....kv.options import CacheOptions
from ....kv.passages.context import Context, Passage, Rows
from ....kv.passages.extent import Extent, Identity
from ....kv.passages.library import DATA, ExtentWriter, Library
from ....kv.places import Places
from ....sizes import parse_size
from ....suggestions import suggests_keywords
from ..cache_argument import CACHE_NAMES, cache_name
from ..enable import enable_kv_cache
from ..identity import fingerprint as fingerprints
from ..identity.watch import Watch
from .cache import PassageCache, check_ids
from .rotary import rotary_rows

log = logging.getLogger(__name__)

MODES = ("prefix", "blocks")
#: Passages are computed by so many tokens at a time, in whole blocks.
_CHUNK_TOKENS = 1024

Ids: TypeAlias = Sequence[int] | torch.Tensor | np.ndarray[Any, Any]


@dataclass
class _Prompt:
    """What a prompt is made of, while it is composed and used.

    Attributes:
        mode: as of `PassageKV.compose`.
        texts: tokens of the prefix, where there is one, and of each passage.
        identities: of each.
        passages: those that are there so far, in the same order.
        pins: extents in use.
        reused: see `PassageCache.reused`.
    """

    mode: str
    texts: list[np.ndarray]
    identities: list[Identity]
    passages: list[Passage] = field(default_factory=list)
    pins: list[Extent] = field(default_factory=list)
    reused: dict[str, Any] = field(default_factory=dict)


class PassageKV:
    """K and V of passages, each computed once and read from SSD wherever it stands in a prompt. A
    context manager.

    A library holds passages of any models and prefixes side by side, which never meet: an extent is
    found by the model's fingerprint, the tokens before it and its own. Several processes may use
    and fill one. Nothing in it is changed once it is written, so that prompts share it.

    Args:
        model: a decoder with rotary positions in full attention; `enable_kv_cache` is called.
        directory: on the SSD; made where it is missing. Its files are readable by nobody else: rows
            can be turned back into text.
        prefix: token ids that stand before every passage, such as a system prompt (with the token
            that begins a text, if the model has one). Its rows are kept, too.
        tokenizer: counts for what an extent is found by, if given: token ids of another are other
            texts.
        library_bytes: the data file does not grow beyond this size (``200GiB``): what costs least
            to compute again for its bytes and its uses is evicted, and what does not fit all the
            same is computed for each prompt. None: as far as the disk goes.
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
        directory: str | os.PathLike[str],
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
        self._prefix = check_ids("prefix", prefix)
        limit_bytes = None if library_bytes is None else parse_size(library_bytes)
        if model.training:
            raise errors.InvalidInputError(
                "passages of a model", got="a model in training mode", fix="model.eval()"
            )
        self.model = enable_kv_cache(model)
        self.directory, self._process = os.fspath(directory), os.getpid()
        self._lock, self._kind, self._tokenizer = threading.RLock(), fingerprint, tokenizer
        self._rows = rotary_rows(model)
        self._heads = int(model.config.get_text_config(decoder=True).num_attention_heads)
        self._cost = partial(_flops, sum(each.numel() for each in model.base_model.parameters()))
        self._idle: list[Places] = []
        self._caches = weakref.WeakSet[PassageCache]()
        self._is_closed = False
        self._limit_bytes = limit_bytes
        self._open_library()

    def _open_library(self) -> None:
        """Opens the library for the model as it is now."""
        self._watch = Watch(self.model.base_model)
        made_by = fingerprints.fingerprint(self.model, self._kind)
        said = {
            "model": made_by,
            "rows": self._rows.shape.describe(),
            "tokenizer": None if self._tokenizer is None else _tokenizer_digest(self._tokenizer),
        }
        space = hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).digest()
        engine = self._options.engine
        self._library = Library(
            self.directory,
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
            for cache in list(self._caches):
                cache.close()
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
        ids = check_ids("token_ids", token_ids)
        with self._lock:
            self._check()
            texts = [each for each in (self._prefix, ids) if each.size]
            self._check_length(sum(map(len, texts)))
            identity = Identity.of(self._library.space, [], ids)
            key = identity.text.hex()[:32] if key is None else key
            self._library.name(key, ids)
            if ids.size:
                prompt = self._prompt("prefix", [ids])
                try:
                    self._fill(prompt, for_use=False)
                finally:
                    self._library.leave(prompt.pins)
        return key

    def remove(self, key: str) -> None:
        """Forgets a name, and the passage, unless it has another one; prompts that are composed of
        it keep it until they are closed. Raises InvalidInputError for an unknown name."""
        with self._lock:
            self._check()
            if not self._library.remove(key):
                raise _unknown(key)

    def compose(
        self,
        passages: Sequence[str | Ids],
        *,
        mode: str = "blocks",
        repair: int | None = None,
        blend: float | None = None,
        **options: Any,
    ) -> PassageCache:
        """A cache that begins with the prefix and these passages, for `generate` or a forward pass
        (`past_key_values`) over what comes after them. Passages that are not in the library are
        computed and kept; of all others nothing is computed, and nothing is written.

        Args:
            passages: names that `add` returned, or token ids; in the order of the prompt. A passage
                may stand there twice.
            mode: ``blocks``: each passage sees the prefix and itself, as it was computed; it stands
                at its place by rotation: exact by that definition, and another thing than full
                attention, which lets a passage see those before it. ``prefix``: what full attention
                computes: only rows that were computed behind the same tokens are used.
            repair, blend: refused: tokens of passages are not computed again in part.
            **options: of `KVCache`, for rows that come after the passages (`spill_interval`,
                `capacity_tokens`, ...).

        Raises:
            InvalidInputError: an unknown name or mode, or more tokens than the model's positions.
            WriteError, ReadError, DeadlineExceededError.
        """
        for name, value in (("repair", repair), ("blend", blend)):
            if value is not None:
                raise errors.InvalidInputError(
                    f"compose({name}=...)",
                    got=value,
                    expected=f"None: one of {', '.join(MODES)} without it",
                )
        if mode not in MODES:
            raise errors.InvalidInputError("mode", got=repr(mode), expected=", ".join(MODES))
        with self._lock:
            self._check()
            prompt = self._prompt(mode, [self._ids_of(each) for each in passages])
            self._check_length(sum(map(len, prompt.texts)))
            try:
                self._fill(prompt)
                return self._cache(prompt, **options)
            except BaseException:
                self._library.leave(prompt.pins)
                raise

    def _ids_of(self, passage: str | Ids) -> np.ndarray:
        if not isinstance(passage, str):
            return check_ids("a passage", passage)
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

    def _prompt(self, mode: str, texts: list[np.ndarray]) -> _Prompt:
        space, prefix = self._library.space, [self._prefix] if self._prefix.size else []
        every = [*prefix, *texts]
        return _Prompt(
            mode,
            every,
            [
                Identity.of(space, _before(every, number, mode, len(prefix)), ids)
                for number, ids in enumerate(every)
            ],
            reused={
                "tokens": sum(map(len, every)),
                "reused": 0,
                "computed": 0,
                "uncached": 0,
                "damaged": 0,
            },
        )

    def _fill(self, prompt: _Prompt, *, for_use: bool = True) -> None:
        """Finds the passages of a prompt, and computes those that are not there. `for_use`: where
        there is no room for one, it is computed all the same."""
        wanted = [
            (identity, ids)
            for identity, ids in zip(prompt.identities, prompt.texts, strict=True)
            if ids.size
        ]
        known = len(self._library.damaged)
        there = iter(self._library.find(wanted))
        found = [next(there) if ids.size else None for ids in prompt.texts]
        prompt.pins += [each for each in found if each is not None]
        prompt.reused["damaged"] += len(self._library.damaged) - known
        n_prefix, begin = self._n_prefix, 0
        for number, (ids, extent) in enumerate(zip(prompt.texts, found, strict=True)):
            identity, is_counted = prompt.identities[number], number >= n_prefix
            offset = begin - identity.first_position
            begin += len(ids)
            if extent is not None:
                prompt.reused["reused"] += len(ids)
                made = Passage(len(ids), offset, extent, None, is_counted)
            elif ids.size:
                last = number == len(found) - 1
                computed = self._compute(prompt, number, must=for_use or not last)
                prompt.reused["computed"] += len(ids)
                made = Passage(len(ids), offset, computed.extent, computed.rows, is_counted)
            else:
                made = Passage(0, 0, is_counted=is_counted)
            prompt.passages.append(made)

    @property
    def _n_prefix(self) -> int:
        return 1 if self._prefix.size else 0

    # --- computing ---

    def _compute(self, prompt: _Prompt, number: int, *, must: bool = True) -> Passage:
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
        before = _before(prompt.texts, number, prompt.mode, self._n_prefix)
        passages = prompt.passages[: len(before)]
        if isinstance(to, ExtentWriter):
            with to:
                self._run(before, passages, prompt, ids, to.rows)
                extent = to.finish()
            prompt.pins.append(extent)
            return Passage(len(ids), 0, extent)
        prompt.reused["uncached"] += len(ids)
        if not must:
            return Passage(len(ids), 0)
        log.info("a passage of %d tokens stays in memory: the library is full", len(ids))
        parts: list[list[Rows]] = [[] for _ in range(self._rows.shape.layers)]
        self._run(
            before,
            passages,
            prompt,
            ids,
            lambda layer, k, v: parts[layer].append((k.detach().clone(), v.detach().clone())),
        )
        return Passage(len(ids), 0, None, [_joined(each) for each in parts])

    def _run(
        self,
        before: Sequence[np.ndarray],
        passages: Sequence[Passage],
        prompt: _Prompt,
        ids: np.ndarray,
        tap: Callable[[int, torch.Tensor, torch.Tensor], None],
    ) -> None:
        """Runs the model over tokens behind others, and gives each layer's rows to `tap`."""
        body, chunk = self.model.base_model, self._chunk_tokens
        inner = _Prompt(
            prompt.mode,
            list(before),
            prompt.identities[: len(before)],
            [Passage(each.tokens, 0, each.extent, each.rows, False) for each in passages],
            reused=prompt.reused,
        )
        name = cache_name(inspect.signature(body.forward).parameters) or CACHE_NAMES[-1]
        given = torch.from_numpy(ids.astype(np.int64))[None].to(self._device)
        with self._cache(inner, tap=tap, keeps=len(ids) > chunk) as cache, torch.no_grad():
            for begin in range(0, len(ids), chunk):
                body(input_ids=given[:, begin : begin + chunk], use_cache=True, **{name: cache})

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

    def _cache(self, prompt: _Prompt, **options: Any) -> PassageCache:
        """The cache of a prompt whose passages are there. It takes their pins with it."""
        places = self._opened() if any(each.extent for each in prompt.passages) else None
        try:
            context = Context(
                self._rows.shape,
                prompt.passages,
                self._rows.rotations,
                None if places is None else places.striped.devices[0],
                self._options.threads or 0,
            )
            prompt.passages = context.passages
            context.repair = partial(self._repair, prompt)
            ids = np.concatenate([np.empty(0, np.int32), *prompt.texts]).astype(np.int32)
            own = {
                name: getattr(self._options, name)
                for name in ("engine", "device", "compute", "threads", "deadline_s")
            }
            cache = PassageCache(
                self.model.config,
                self.directory,
                context,
                ids,
                prompt.reused,
                release=partial(
                    _release, weakref.ref(self), context, places, self._library, prompt.pins
                ),
                **own | options,
            )
        except BaseException:
            if places is not None:
                places.close()
            raise
        self._caches.add(cache)
        context.begin(self._heads)
        return cache

    def _opened(self) -> Places:
        """The data file, open for one cache."""
        if self._idle:
            return self._idle.pop()
        places = Places(self.directory, self._options, [DATA])
        try:
            places.open(self._device)
        except BaseException:
            places.close()
            raise
        return places

    def _repair(self, prompt: _Prompt, number: int, error: errors.StorageError) -> Passage:
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
        """``extents`` of all models and prefixes in the directory, ``stored_bytes`` of them,
        ``file_bytes``: where the last of them ends, ``damaged``: how many were found so far."""
        with self._lock:
            self._check()
            return self._library.stats()

    def close(self) -> None:
        """Closes the caches that are composed of passages, and the library. May be called again."""
        with self._lock:
            if self._is_closed:
                return
            for cache in list(self._caches):
                cache.close()
            self._is_closed = True
            while self._idle:
                self._idle.pop().close()
            self._library.close()

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
        return f"<PassageKV in {self.directory}{', closed' if self._is_closed else ''}>"


def _before(texts: Sequence[np.ndarray], number: int, mode: str, n_prefix: int) -> list[np.ndarray]:
    """What a text is computed behind: the prefix, or all that stands before it."""
    return list(texts[: number if mode == "prefix" else min(number, n_prefix)])


def _release(
    owner: weakref.ref[PassageKV],
    context: Context,
    places: Places | None,
    library: Library,
    pins: list[Extent],
) -> None:
    """The end of a cache: its device may serve the next one."""
    device: RowDevice | None = context.close()
    mine = owner()
    if places is not None and device is not None:
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
