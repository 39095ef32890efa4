"""Models larger than memory: `load_streamed` gives a transformers model whose layers' weights stay
in their safetensors files.

While a layer computes, the next one is being read; layers that fit in the budget stay in memory.
`micro_batches` sends a batch through each layer in parts while its weights are there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Cache, GenerationConfig, PreTrainedModel

from ... import errors
from ...checks import check_path
from ...forks import check_own, compute_alone
from ...sizes import parse_size
from ...storage import Engine, open_engine
from ...suggestions import suggests_keywords
from ...weights.layers import Share, share
from ...weights.safetensors_files import find_tensors
from ...weights.stream import WeightFiles, WeightStream
from ...weights.sums import stored_sum
from .batches import GroupedCache, micro_batches, undo
from .model import (
    ModelWeights,
    empty_model,
    fill_buffers,
    find_layers,
    main_dtype,
    match,
    read_config,
)

__all__ = ["GroupedCache", "StreamedWeights", "load_streamed", "micro_batches"]


@suggests_keywords
def load_streamed(
    path: str | os.PathLike[str],
    memory: int | str,
    dtype: torch.dtype | None = None,
    engine: str | os.PathLike[str] | Callable[[], Engine] = "auto",
    *,
    read_ahead: int = 1,
) -> PreTrainedModel:
    """A causal language model on the CPU, for inference, that needs no more memory for weights than
    it is given.

    Args:
        path: a Hugging Face model's folder: ``config.json``, and ``model.safetensors`` or shards
            with an index.
        memory: for weights and the buffers that they are read into; K, V and activations come on
            top.
        dtype: converts floating-point weights, each layer's when it arrives; None keeps what is in
            the files.
        engine: ``auto``, ``uring``, ``posix``, a file of settings (``nvme.toml``, see
            docs/engine.md), or how to make an engine.
        read_ahead: layers that are read while one computes. More than one pays where layers differ
            much in size.

    Returns:
        The model, in evaluation mode, with `espnx_stats()` (counters) and `espnx_weights` (a
        `StreamedWeights`; `close()` ends all I/O).

    Raises:
        InvalidInputError: no such model, or a budget that is too small; then it says the least that
            works.
        FormatError, TruncatedFileError: the files are damaged, or are not this model's.
        ReadError, DeadlineExceededError: also from a forward pass; the model can be used again
            after it.
    """
    compute_alone()
    if read_ahead < 1:
        raise errors.InvalidInputError("read_ahead", got=read_ahead, expected="at least 1")
    folder, budget_bytes = Path(check_path("model", path)), parse_size(memory)
    config = read_config(folder)
    tensors = find_tensors(folder)
    model = empty_model(config, dtype or main_dtype(tensors))
    weights = match(model, tensors, dtype)
    plan = share(weights.other_bytes, weights.layers, budget_bytes, read_ahead)
    files = WeightFiles(open_engine(engine) if isinstance(engine, (str, os.PathLike)) else engine())
    try:
        model.espnx_weights = StreamedWeights(model, weights, plan, files, budget_bytes)
    except BaseException:
        files.engine.close()
        raise
    model.espnx_stats = model.espnx_weights.stats
    model.config._name_or_path = str(folder)
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


class StreamedWeights:
    """The weights of one model: those in memory, and the stream of the others. Made by
    `load_streamed`.

    Attributes:
        plan: which layers stay in memory, and the buffers of the others.
        budget_bytes: what the caller allowed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        weights: ModelWeights,
        plan: Share,
        files: WeightFiles,
        budget_bytes: int,
    ):
        self.plan, self.budget_bytes, self.files = plan, budget_bytes, files
        self._layer_bytes = sum(weights.layers[number].stored_bytes for number in plan.streamed)
        prefix, layers = find_layers(model)
        self._names = [prefix + f".{number}." for number in range(len(layers))]
        fill_buffers(model)
        for weight in weights.others.values():
            _set(model, weight.name, files.resident(weight))
        model.tie_weights(missing_keys=set(weights.missing), recompute_mapping=False)
        for number in plan.resident:
            for weight in weights.layers[number].weights:
                _set(model, weight.name, files.resident(weight))
        self._resident_bytes = _storage_bytes(model)
        self._check_whole(model)
        self._stream: WeightStream | None = None
        if plan.streamed:
            self._stream = WeightStream(
                files,
                {number: weights.layers[number] for number in plan.streamed},
                slots=plan.slots,
                slot_bytes=plan.slot_bytes,
                converted_bytes=plan.converted_bytes,
            )
        self._process = os.getpid()
        # either may be called
        for part in {id(each): each for each in (model, model.base_model)}.values():
            part.register_forward_pre_hook(self._check_process, prepend=True)
        self._user: int | None = None  # the thread that is inside a streamed layer
        for number in plan.streamed:
            skip = len(self._names[number])
            layers[number].espnx_streamed = {
                weight.name[skip:]: partial(stored_sum, files, weight)
                for weight in weights.layers[number].weights
            }
            layers[number].register_forward_pre_hook(
                partial(self._before, number), with_kwargs=True, prepend=True
            )
            layers[number].register_forward_hook(partial(self._after, number), always_call=True)

    def _check_whole(self, model: PreTrainedModel) -> None:
        streamed = tuple(self._names[number] for number in self.plan.streamed)
        lost = [
            name
            for name, tensor in model.state_dict().items()
            if tensor.is_meta and not name.startswith(streamed or "\0")
        ]
        if lost:
            raise errors.FormatError(
                f"weights of {type(model).__name__}",
                got=f"{lost[0]} in no file",
                expected="all of them",
            )

    def _check_process(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        """Raises InvalidInputError in a child of the process whose engine reads the weights."""
        if self._stream is None:
            compute_alone()
        else:
            check_own(self._process, "the streamed model", "load it after fork()")

    def _before(
        self, number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if torch.is_grad_enabled() and any(
            _wants_grad(value) for value in (*args, *kwargs.values())
        ):
            raise errors.InvalidInputError(
                "a streamed model cannot be differentiated: its weights are gone when gradients "
                "come",
                fix="with torch.no_grad(): ...",
            )
        if self._user not in (None, threading.get_ident()):
            raise errors.StateError(
                "a streamed model", got="two forward passes at a time", expected="one"
            )
        if self._stream is None:
            return
        self._user = threading.get_ident()
        try:
            tensors = self._stream.take(number)
        except BaseException:
            self._user = None
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            for value in (*args, *kwargs.values()):
                if isinstance(value, Cache):
                    undo(value, number, hidden.shape[1])
            raise
        self._put(number, module, tensors)

    def _after(self, number: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._stream is None or self._user != threading.get_ident():
            return
        self._put(
            number,
            module,
            {
                name: torch.empty_like(p, device="meta")
                for name, p in self._own(number, module).items()
            },
        )
        self._user = None
        self._stream.give_back(number)

    def _own(self, number: int, module: nn.Module) -> dict[str, torch.Tensor]:
        return {
            self._names[number] + name: parameter for name, parameter in module.named_parameters()
        }

    def _put(self, number: int, module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
        skip = len(self._names[number])
        for name, tensor in tensors.items():
            _set(module, name[skip:], tensor)

    @property
    def buffer_bytes(self) -> int:
        return 0 if self._stream is None else self._stream.buffer_bytes

    def stats(self) -> dict[str, Any]:
        """Counters: bytes read (asked for and moved), seconds of waiting and converting, bytes in
        memory, the path that the bytes took."""
        counters = self.files.counters
        return {
            "bytes_asked": counters.bytes_asked,
            "bytes_moved": counters.bytes_moved,
            "layer_reads": counters.layer_reads,
            "waiting_s": counters.waiting_s,
            "converting_s": counters.converting_s,
            "resident_bytes": self._resident_bytes,
            "buffer_bytes": self.buffer_bytes,
            "planned_bytes": self.plan.total_bytes,
            "budget_bytes": self.budget_bytes,
            "least_bytes": self.plan.least_bytes,
            "layers_resident": len(self.plan.resident),
            "layers_streamed": len(self.plan.streamed),
            "bytes_per_pass": self._layer_bytes,
            "requested_path": self.files.engine.requested,
            "effective_path": self.files.effective_path,
        }

    def close(self) -> None:
        """Ends all I/O. A forward pass raises EngineClosedError then, unless all layers are in
        memory."""
        if self._stream is not None:
            self._stream.forget()
        self.files.engine.close()


def _set(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Puts a weight (or a buffer) in place; the module's parameters are replaced, for those of the
    meta device cannot be filled."""
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    if last in owner._buffers:
        owner._buffers[last] = tensor
    else:
        owner._parameters[last] = nn.Parameter(tensor, requires_grad=False)


def _storage_bytes(model: PreTrainedModel) -> int:
    """Bytes of all weights in memory, each storage counted once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in model.state_dict().values()
        if not tensor.is_meta
    }
    return sum(storages.values())


def _wants_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
