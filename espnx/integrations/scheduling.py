"""What the scheduler is told of a model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from transformers import PreTrainedModel

from ..kv.cache import SsdCache
from ..kv.schedule import Decision, Shape, decide
from .dense import dense_seconds


def schedule(model: PreTrainedModel, ids: torch.Tensor, store: SsdCache, layers: Sequence[int], threads: int) -> Decision:
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
    kinds = {(getattr(each, "num_key_value_heads", None) or heads, getattr(each, "head_dim", None) or hidden // heads) for each in own}
    if len(kinds) != 1:
        return Decision(0, "layers of several shapes, or none")
    n_kv, d = kinds.pop()
    shape = Shape(
        layers=len(layers), sequences=ids.shape[0], tokens=max(ids.shape[1], store.capacity_tokens or 0),
        hidden=hidden, heads=heads,
        n_kv=n_kv, d=d,
        dtype=next(model.parameters()).dtype, is_rotary=getattr(config, "rope_parameters", None) is not None,
    )  # fmt: skip
    store.follow(ids.device)  # what computes on rows is measured, so they go first where they will be
    # Beams and samples of one prompt stand together and are exchanged among themselves: all of them keep X, or none.
    same = (ids[1:] == ids[:-1]).all(dim=1).tolist()
    group = same.index(False) + 1 if False in same else ids.shape[0]
    group = group if ids.shape[0] % group == 0 else ids.shape[0]
    return decide(shape, store.spread.devices, partial(dense_seconds, model, ids.shape[0]), group, threads)
