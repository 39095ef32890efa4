"""The passages of prompts: those that a library has, and those that are computed, into it or, where
there is no room, into memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from .... import errors
from ....kv.passages.context import Context, Passage
from ....kv.passages.early import EarlyReads
from ....kv.passages.extent import Extent, Identity, Rows
from ....kv.passages.library import ExtentWriter, Library
from .anew import compute_anew, deviating_tokens, first_tokens
from .cache import PassageCache
from .model import PassageModel
from .open_caches import OpenCaches
from .prompts import Prompts

log = logging.getLogger(__name__)


class Filling:
    """Fills prompts with passages. One thread at a time, which holds the lock.

    Args:
        model: computes.
        library: of its passages.
        caches: that it computes with.
        lock: of the library, for a passage that turns out to be damaged in a model's pass.
    """

    def __init__(
        self,
        model: PassageModel,
        library: Library,
        caches: OpenCaches,
        lock: AbstractContextManager[object],
    ):
        self._model, self._library, self._caches, self._lock = model, library, caches, lock

    def fill(
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

    def _compute(self, prompt: Prompts, number: int, *, must: bool = True) -> Passage:
        """Computes one passage behind what stands before it, into the library, or where there is no
        room into memory. `must`: False: nothing is computed then."""
        ids, identity = prompt.texts[number], prompt.identities[number]
        try:
            to = self._library.write(identity, ids, self._model.flops(identity))
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
        parts: list[list[Rows]] = [[] for _ in range(self._model.rows.shape.layers)]
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
        before, ids = prompt.before(number), prompt.texts[number]
        chunk = self._model.chunk_tokens
        inner = Prompts(
            prompt.mode,
            prompt.n_prefix,
            [prompt.texts[i] for i in before],
            [0] * len(before),
            [prompt.identities[i] for i in before],
            [replace(prompt.passages[i], is_counted=False, text=0) for i in before],
            reused=prompt.reused,
        )
        keeps = len(ids) > chunk
        with self._caches.make(self._library, inner, self.renew, tap=tap, keeps=keeps) as cache:
            for begin in range(0, len(ids), chunk):
                prompt.check()
                self._model.run(cache, ids[begin : begin + chunk])

    def compute_anew(
        self, cache: PassageCache, prompt: Prompts, repair: int | None, blend: float | None
    ) -> None:
        """Computes tokens of passages anew at their place, as `PassageKV.compose` says."""
        store, rows, chunk = cache.store, self._model.rows, self._model.chunk_tokens

        def run(cache: PassageCache, ids: np.ndarray, positions: torch.Tensor) -> None:
            prompt.check()
            self._model.run(cache, ids, positions)

        if repair is not None:
            chosen = first_tokens(prompt, repair)
        elif blend is not None:
            chosen = deviating_tokens(
                cache,
                prompt,
                blend,
                run,
                partial(self._layer_rows, store.context, 1),
                rows.rotations[min(1, len(rows.rotations) - 1)],
                chunk,
            )
            store.context.layers = rows.shape.layers
        else:
            return
        compute_anew(cache, prompt, chosen, run, chunk)
        cache.forget_text()

    def _layer_rows(self, context: Context, layer: int, number: int) -> Rows:
        """A layer's rows of a passage of a prompt, as they are kept."""
        passage = context.passages[number]
        if passage.extent is not None:
            try:
                return self._library.rows(passage.extent, layer)
            except (errors.ChecksumError, errors.ReadError, errors.TruncatedFileError) as error:
                context.renew_passage(number, error)
                return self._layer_rows(context, layer, number)
        if passage.rows is None:
            raise errors.StateError("a passage without rows", got=number)
        return passage.rows[layer]

    def renew(self, prompt: Prompts, number: int, error: errors.StorageError) -> Passage:
        """Computes a passage anew that was found damaged while it was attended to. Where that
        cannot be, it is not found any more, and the error is raised."""
        extent = prompt.passages[number].extent
        if extent is None or self._caches.is_closed:
            raise error
        with self._lock:
            self._library.damage(extent, error.offset_bytes or 0, error.size_bytes or 0)
            prompt.reused["damaged"] += 1
            if self._model.is_streamed:
                raise error
            log.warning("a passage is damaged, and computed anew: %s", error)
            made = self._compute(prompt, number)
            prompt.reused["computed"] += made.tokens
            prompt.reused["reused"] -= made.tokens
        return made


def _joined(parts: Sequence[Rows]) -> Rows:
    """Rows that came some tokens at a time."""
    k, v = (torch.cat([each[i] for each in parts], dim=2).contiguous() for i in (0, 1))
    return k, v
