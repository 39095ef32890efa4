"""What a cache and its layers share of forward passes: the hooks of an enabled model tell of them
here, stored layers ask here."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from .... import errors
from ....kv.cache import SsdCache
from ..kept import KeptState
from ..text import Text
from .attention import NAME, awaited
from .layers import LayersInMemory, StoredLayer
from .passes import ForwardPass, PassGuard, PassTimes
from .projections import LayerInput, Source
from .schedule import XRows


class PassState:
    """The forward passes of one cache, and what is known of the tokens that they brought.

    Args:
        layers: of the cache.
        store: the rows of those that are stored.
        kept: where the cache has a name.
        x_rows, threads: of `XRows`.

    Attributes:
        store: as given.
        x: how many sequences keep X.
        stored, in_memory: the two kinds of layers.
        text: the tokens in the cache.
        guard: of the pass under way.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        store: SsdCache,
        kept: KeptState | None,
        x_rows: int | None,
        threads: int | None,
    ):
        self.store, self._kept = store, kept
        self.stored = [layer for layer in layers if isinstance(layer, StoredLayer)]
        self.in_memory = LayersInMemory(
            [layer for layer in layers if not isinstance(layer, StoredLayer)]
        )
        for layer in self.stored:
            layer.join(self)
        self.text = Text()
        self.x = XRows(store, [layer.number for layer in self.stored], x_rows, threads)
        self._of_framework = Cache(layers=list(layers))
        self.guard, self._is_prompting = PassGuard(), False
        # of the model that was checked last
        self._core: Callable[[], torch.nn.Module | None] = lambda: None

    @property
    def times(self) -> PassTimes:
        """How long the passes took so far."""
        return self.guard.times

    def length(self, layer: int = 0) -> int:
        """Tokens in the cache, without those of the pass under way. `layer`: counts where no layer
        is stored."""
        # what the pass has added to some of its layers counts when it ends
        if (held := self.guard.held) is not None:
            return held
        if not self.stored:
            return self._of_framework.get_seq_length(layer)
        return min(self.store.rows.length(each.number) for each in self.stored)

    # --- what hooks tell ---

    def begin(
        self, model: PreTrainedModel, ids: torch.Tensor | None, sequences: int | None
    ) -> None:
        """A forward pass of a model begins, over these new tokens (None: not known) of this many
        sequences (None: not known).

        Raises:
            StateError: the model does not attend through espnx, or the cache is being used by
                another thread.
            InvalidInputError: the model has other layers, the cache holds another batch, or another
                process made it.
            ForeignFileError: a kept cache is of another model.
        """
        self.store.check_process()  # before anything waits for a thread or a lock of the parent's
        with self.guard.lock:
            if self.guard.is_inside(model):
                return
            self.abort()
            self.check_model(model, sequences)
            held = self.length()
            if held == 0:
                self.x.choose(model, ids)
            self.store.begin(held)
            self.x.rotations.crop(held)
            self.guard.begin(
                ForwardPass(model, held, self.text.hidden, self.in_memory.states()),
                ids,
                is_step=None if self._is_drafting else self._is_step(ids, held),
            )
            if not self._is_drafting:
                self.text.extend(ids, held)

    @contextmanager
    def prompting(self) -> Iterator[None]:
        """Passes inside compute a prompt, whether or not its tokens may be rejected."""
        self._is_prompting = True
        try:
            yield
        finally:
            self._is_prompting = False

    @property
    def _is_drafting(self) -> bool:
        return self.store.proposal is not None and self.store.proposal.is_drafting

    def _is_step(self, ids: torch.Tensor | None, held: int) -> bool:
        """Whether a pass is of decoding; otherwise it computes a prompt."""
        is_short = ids is not None and ids.shape[1] == 1
        is_decided = self.store.proposal is not None and not self._is_prompting
        return held > 0 and (is_short or is_decided)

    def check_model(self, model: PreTrainedModel, sequences: int | None) -> None:
        """Raises what `begin` raises of the model and the batch."""
        text = model.config.get_text_config(decoder=True)
        if text._attn_implementation != NAME:
            raise errors.StateError(
                f"attention of {type(model).__name__}",
                got=repr(text._attn_implementation),
                expected=repr(NAME),
                fix="espnx.enable_kv_cache(model)",
            )
        n_layers = len(self._of_framework.layers)
        if self.length() and sequences is not None:
            self.store.check_sequences(sequences)
        core = model.base_model
        if core is not self._core() and (got := len(text.per_layer_config)) != n_layers:
            raise errors.InvalidInputError(
                f"layers of {type(model).__name__}",
                got=got,
                expected=f"{n_layers}, as in the config that the cache was made with",
            )
        if self._kept is not None:
            self._kept.check(model)
        self._core = weakref.ref(core)

    def end(self, model: torch.nn.Module, *, failed: bool) -> None:
        """The model has returned, or an error ended it; where one is inside another, the outer
        one's end counts.

        Raises:
            StateError: attention did not ask for the K and V of a layer.
            ChecksumError: rows that the pass looked at are damaged; it is taken out of the cache.
        """
        if not self.guard.is_of(model):
            return
        unanswered = next((layer for layer in self.stored if layer.pending is not None), None)
        try:
            if unanswered is not None and not failed:
                unanswered.check_answered()
        finally:
            if failed or unanswered is not None:
                self.abort()
        for layer in self.stored:
            layer.end_pass()
        try:
            self.store.end()
        except BaseException as error:
            self.fail(error)
            raise
        self.guard.end()

    def abort(self) -> None:
        """Takes a pass that has not come to its end out of all layers. Raises StateError while
        another thread runs it."""
        with self.guard.lock:
            begun = self.guard.abort()
            if begun is None:
                return
            awaited.layer = None
            for layer in self.stored:
                layer.forget_pass()
            if begun.held:
                self.store.crop(begun.held)
            else:
                self.store.clear()
            self.in_memory.restore(begun.in_memory)
            self.text.hide(begun.hidden)

    # --- what stored layers ask (`layers.LayerHost`) ---

    def made_of(
        self, layer_input: LayerInput | None, k: torch.Tensor, v: torch.Tensor, past: int
    ) -> Source | None:
        """What these K and V of new tokens were projected from, after `past` others; None where X
        rows are not kept."""
        return self.x.source(layer_input, k, v, past) if self.store.rows.x_rows else None

    def fail(self, error: BaseException) -> None:
        """The pass cannot go on. The error is told the tokens so far."""
        self.abort()
        if self.text.tokens is not None:
            error.sequences = self.text.tokens  # type: ignore[attr-defined]

    # --- what of it is kept ---

    def resume(self) -> None:
        """Goes on from what was kept under the cache's name, if anything was. Raises what
        `KeptState.open` raises."""
        tensors = None if self._kept is None else self._kept.open(self.store, self.x.asked)
        if tensors is not None:
            self.text.restore(tensors)
            self.x.rotations.restore(tensors)
            self.x.asked = self.store.rows.x_rows
            for layer in self.stored:
                layer.is_initialized = True

    def save(self) -> None:
        """Publishes the rows, and what is known of their tokens, under the cache's name, if it has
        one. Raises WriteError, DiskFullError."""
        self.abort()
        tensors = self.text.tensors(self.length())
        # without X rows nothing is computed again, and rotations do not grow with the text
        if self.store.rows.x_rows:
            tensors |= self.x.rotations.tensors()
        if self._kept is not None:
            self._kept.save(self.store, tensors)

    # --- what becomes of the batch ---

    @property
    def sequences(self) -> int:
        """Sequences of the batch, by stored layers, or where there are none by those in memory; 0
        while nothing is cached."""
        return self.store.rows.sequences or self.in_memory.sequences

    def select(self, sequences: list[int]) -> None:
        """Sequence i becomes what `sequences[i]` was, in every layer or, whatever raises, in
        none."""
        self.abort()
        if sequences == list(range(self.sequences)):
            return
        self.store.rows.check_select(sequences)
        with self._all_or_none():
            self.in_memory.select(sequences)
            self.store.select(sequences)
        self.x.rotations.select(sequences)
        self.text.select(sequences)

    def crop(self, tokens: int) -> None:
        """Forgets the last tokens, fewer than there are, in every layer or, whatever raises, in
        none. Raises InvalidInputError where a layer in memory cannot go back."""
        if not tokens:
            self.in_memory.crop(0)
            return
        held = self.length()
        if why := self.in_memory.why_not_cropped(tokens):
            raise errors.InvalidInputError(
                f"crop by {tokens} of {held} tokens",
                got=why,
                expected="layers that can forget tokens",
                fix="reset(), and compute the prompt again",
            )
        with self._all_or_none():
            self.in_memory.crop(tokens)
            self.store.crop(held - tokens)

    def reusable(self, ids: torch.Tensor, attention_mask: torch.Tensor | None) -> int:
        """How many of the tokens in the cache a new prompt [sequences, n] begins with, but for its
        last one; 0 where layers in memory cannot go back to them."""
        held = self.length()
        if len(ids) != self.sequences:
            return 0
        common = self.text.common(ids, attention_mask, held)
        can = common == held or self.in_memory.why_not_cropped(held - common) is None
        return common if can else 0

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """A change of every layer. What is half changed where an error comes is forgotten: no layer
        continues with another's tokens."""
        before = self.in_memory.states()
        try:
            yield
        except errors.InvalidInputError:  # refused: stored rows are as they were
            self.in_memory.restore(before)
            raise
        except BaseException:
            self.abort()
            self.clear()
            raise

    def clear(self) -> None:
        """Nothing is left of the text, in any layer."""
        self.store.clear()
        self.x.clear()
        self.text.clear()
        self.in_memory.empty()
