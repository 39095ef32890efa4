"""What the scheduler is told of a model: the shape of its rows, and how long a decoding step takes without attention."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ...device.interface import RowDevice
from ...kv.cache import SsdCache
from ...kv.schedule import Decision, Shape, decide


def _opened(store: SsdCache, compute: torch.device) -> Sequence[RowDevice]:
    """What computes on rows is measured where it will be."""
    store.places.open(compute)
    return store.striped.devices


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
        layers=len(layers), sequences=ids.shape[0], tokens=max(ids.shape[1], store.options.capacity_tokens or 0),
        hidden=hidden, heads=heads,
        n_kv=n_kv, d=d,
        dtype=next(model.parameters()).dtype, is_rotary=getattr(config, "rope_parameters", None) is not None,
    )  # fmt: skip
    # Beams and samples of one prompt stand together and are exchanged among themselves: all of them keep X, or none.
    same = (ids[1:] == ids[:-1]).all(dim=1).tolist()
    group = same.index(False) + 1 if False in same else ids.shape[0]
    group = group if ids.shape[0] % group == 0 else ids.shape[0]
    return decide(shape, partial(_opened, store, ids.device), partial(dense_seconds, model, ids.shape[0]), group, threads)


@torch.inference_mode()
def dense_seconds(model: nn.Module, sequences: int) -> float:
    """Seconds of one token of each of `sequences` through every linear layer: measured twice, the faster counts, since weights that are
    mapped come from their file at the first touch. Layers whose weights are not in memory (streamed models) count nothing."""
    parts = [part for part in model.modules() if isinstance(part, (nn.Linear, Conv1D)) and not part.weight.is_meta]
    rows = {
        part: torch.zeros(sequences, part.in_features if isinstance(part, nn.Linear) else part.nx, dtype=part.weight.dtype,
                          device=part.weight.device)
        for part in parts
    }  # fmt: skip
    return min(_once(rows) for _ in range(2))


def _once(rows: dict[nn.Linear | Conv1D, torch.Tensor]) -> float:
    begun = time.perf_counter()
    for part, x in rows.items():
        type(part).forward(part, x)  # hooks are for the model's own passes
    if any(x.is_cuda for x in rows.values()):
        torch.cuda.synchronize()
    return time.perf_counter() - begun
