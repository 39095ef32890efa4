"""A look at a model that every forward pass can afford: is it still the one whose fingerprint was
made when its cache was opened?

This is a file of its own: a fingerprint is of a model at rest, for other processes; a look compares
a model with itself.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .model_parts import is_adapter, parts_of


class Watch:
    """Notes a model's modules, tensors and adapters, without keeping them alive.

    It sees modules, parameters and packed weights that come, go or are replaced, changes of tensors
    that PyTorch counts, tensors that are moved or cast, adapters that are switched, merged and
    scaled. It does not see a plain attribute or a hook that is changed; the next fingerprint does.
    """

    def __init__(self, model: torch.nn.Module):
        modules = list(model.modules())
        # come and go
        streamed = {
            id(part)
            for module in modules
            if hasattr(module, "espnx_streamed")
            for part in module.modules()
        }
        self._adapters: list[weakref.ref[Any]] = [
            weakref.ref(module) for module in modules if is_adapter(module)
        ]
        self._parents = [weakref.ref(module) for module in modules if module._modules]
        self._owners = [
            weakref.ref(module)
            for module in modules
            if module._parameters and id(module) not in streamed
        ]
        packing = [
            module
            for module in modules
            if type(module)._save_to_state_dict is not torch.nn.Module._save_to_state_dict
        ]
        self._packing = [weakref.ref(module) for module in packing if id(module) not in streamed]
        tensors = [
            weakref.ref(tensor)
            for part in parts_of(model)
            for _, tensor, owner in part.tensors
            if id(owner) not in streamed and not tensor.is_inference()
        ]
        # without what was made to be looked at: unpacked weights
        self._tensors = [ref for ref in tensors if ref() is not None]
        self._seen = self._look()

    def is_unchanged(self) -> bool:
        """Since it was made. False where the model is gone."""
        return self._seen is not None and self._look() == self._seen

    def _look(self) -> Any:
        try:
            return (
                [list(map(id, ref()._modules.values())) for ref in self._parents],  # type: ignore[union-attr]
                [list(map(id, ref()._parameters.values())) for ref in self._owners],  # type: ignore[union-attr]
                [
                    id(value)
                    for ref in self._packing
                    for value in vars(ref()).values()
                    if isinstance(value, torch.ScriptObject)
                ],
                [(ref()._version, ref().data_ptr(), ref().dtype) for ref in self._tensors],  # type: ignore[union-attr]
                [_switches(ref()) for ref in self._adapters],
            )
        except AttributeError:  # of None: something is gone
            return None


def _switches(adapter: Any) -> tuple[Any, ...]:
    scaling = getattr(adapter, "scaling", None)
    scales = tuple(scaling.values()) if isinstance(scaling, dict) else scaling
    return (
        str(adapter._active_adapter),
        adapter._disable_adapters,
        len(adapter.merged_adapters),
        scales,
    )
