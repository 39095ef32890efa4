"""How many sequences of a batch keep X: as the caller asks, or as the scheduler decides, who is
told the shape of the rows and how long a decoding step takes without attention."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .... import errors
from ....device.interface import RowDevice
from ....kv.cache import SsdCache
from ....kv.schedule import Decision, Shape, decide
from ....streams import wait_for
from .projections import LayerInput, Rotations, Source

log = logging.getLogger(__name__)


class XRows:
    """The X rows of a cache.

    Args:
        store: the cache's rows.
        layers: numbers of those that are stored.
        asked: of how many sequences X is to be kept; None: as many as a short measurement says is
            fastest.
        threads: that compute on rows; None: as many as PyTorch uses.

    Attributes:
        asked: as given; after a kept cache was continued, as many as it keeps.
        decision: how many, and why; None: it was not asked for, or nothing has come yet.
        rotations: of the positions of all tokens, by which K is made of X again.
    """

    def __init__(
        self, store: SsdCache, layers: Sequence[int], asked: int | None, threads: int | None
    ):
        self._store, self._layers, self.asked, self._threads = store, layers, asked, threads or 0
        self.decision: Decision | None = None
        self.rotations = Rotations()
        self._is_unconfirmed = False

    def choose(self, model: PreTrainedModel, ids: torch.Tensor | None) -> None:
        """Decides for a batch that begins with these tokens. Raises InvalidInputError where X rows
        are asked for and the model allows none."""
        if self.asked and (why := getattr(model, "_espnx_why_no_x", None)):
            raise errors.InvalidInputError(
                "x_rows",
                got=f"{self.asked}, and {why}",
                expected="0 for this model",
                fix="x_rows=0",
            )
        if self.asked is None:
            self.decision = (
                None
                if ids is None
                else schedule(model, ids, self._store, self._layers, self._threads)
            )
        self._store.rows.x_rows = self.decision.x_rows if self.decision else self.asked or 0
        log.debug(
            "%d sequences keep X instead of K and V: %s",
            self._store.rows.x_rows,
            self.decision.why if self.decision else "as asked",
        )
        self._is_unconfirmed = self.asked is None and self._store.rows.x_rows > 0

    def source(
        self, layer_input: LayerInput | None, k: torch.Tensor, v: torch.Tensor, past: int
    ) -> Source | None:
        """What K and V of new tokens after `past` others are made of.

        Where X rows were this cache's own idea, the first layer shows whether the model makes K and
        V as is known here; if it does not, K and V are kept: None. Raises InvalidInputError where X
        rows were asked for."""
        try:
            source = (
                None
                if layer_input is None
                else layer_input.source(k.shape[1], self.rotations, past)
            )
            if self._is_unconfirmed:
                if source is None:
                    raise errors.InvalidInputError(
                        "X rows of this model", got="no input of its projections"
                    )
                x, projection = source
                projection.check(x[0, :8], k[0, :, :8], v[0, :, :8], 0)
        except errors.InvalidInputError as error:
            if not self._is_unconfirmed:
                raise
            self.decision, self._store.rows.x_rows = Decision(0, str(error)), 0
            source = None
        self._is_unconfirmed = False
        return source

    def clear(self) -> None:
        """Nothing is left of the text."""
        self.rotations = Rotations()


def _opened(store: SsdCache, compute: torch.device) -> Sequence[RowDevice]:
    """What computes on rows is measured where it will be."""
    store.places.open(compute)
    return store.striped.devices


def schedule(
    model: PreTrainedModel, ids: torch.Tensor, store: SsdCache, layers: Sequence[int], threads: int
) -> Decision:
    """How many sequences of a batch keep X.

    Args:
        ids: int64 [sequences, tokens], with which an empty cache begins.
        layers: those whose rows are stored.
        threads: that compute on rows; 0: as many as PyTorch uses.
    """
    config = model.config.get_text_config(decoder=True)
    if why := getattr(model, "_espnx_why_no_x", None):
        return Decision(0, why)
    heads, hidden = config.num_attention_heads, config.hidden_size
    own = [config.per_layer_config[number] for number in layers]
    kinds = {
        (
            getattr(each, "num_key_value_heads", None) or heads,
            getattr(each, "head_dim", None) or hidden // heads,
        )
        for each in own
    }
    if len(kinds) != 1:
        return Decision(0, "layers of several shapes, or none")
    n_kv, d = kinds.pop()
    shape = Shape(
        layers=len(layers),
        sequences=ids.shape[0],
        tokens=max(ids.shape[1], store.options.capacity_tokens or 0),
        hidden=hidden,
        heads=heads,
        n_kv=n_kv,
        d=d,
        dtype=next(model.parameters()).dtype,
        is_rotary=getattr(config, "rope_parameters", None) is not None,
    )
    # Beams and samples of one prompt stand together and are exchanged among themselves: all of them
    # keep X, or none.
    same = (ids[1:] == ids[:-1]).all(dim=1).tolist()
    group = same.index(False) + 1 if False in same else ids.shape[0]
    group = group if ids.shape[0] % group == 0 else ids.shape[0]
    return decide(
        shape,
        partial(_opened, store, ids.device),
        partial(dense_seconds, model, ids.shape[0]),
        group,
        threads,
    )


@torch.inference_mode()
def dense_seconds(model: nn.Module, sequences: int) -> float:
    """Seconds of one token of each of `sequences` through every linear layer: measured twice, the
    faster counts, since weights that are mapped come from their file at the first touch. Layers
    whose weights are not in memory (streamed models) count nothing."""
    parts = [
        part
        for part in model.modules()
        if isinstance(part, (nn.Linear, Conv1D)) and not part.weight.is_meta
    ]
    rows = {
        part: torch.zeros(
            sequences,
            part.in_features if isinstance(part, nn.Linear) else part.nx,
            dtype=part.weight.dtype,
            device=part.weight.device,
        )
        for part in parts
    }
    return min(_once(rows) for _ in range(2))


def _once(rows: dict[nn.Linear | Conv1D, torch.Tensor]) -> float:
    begun = time.perf_counter()
    for part, x in rows.items():
        type(part).forward(part, x)  # hooks are for the model's own passes
    for device in {x.device for x in rows.values()}:  # which the current one need not be
        wait_for(device)
    return time.perf_counter() - begun
