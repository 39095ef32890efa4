"""Near-storage devices: where rows of state lie, and what computes beside them.

>>> device = espnx.device.open("ssd", "/mnt/nvme")                    # doctest: +SKIP
>>> cache = espnx.KVCache(model.config, device=device)

A device of your own derives from `NearStorageDevice` (docs/devices.md).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .emulation.use import watch
    from .interface import Capabilities
    from .near_storage import NearStorageDevice
    from .registry import device_names as names
    from .registry import open_device as open  # noqa: A004 - read as espnx.device.open

_HOME = {
    "Capabilities": ("interface", "Capabilities"),
    "NearStorageDevice": ("near_storage", "NearStorageDevice"),
    "names": ("registry", "device_names"),
    "open": ("registry", "open_device"),
    "watch": ("emulation.use", "watch"),
}

__all__ = ["Capabilities", "NearStorageDevice", "names", "open", "watch"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        import importlib

        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, attribute = _HOME[name]
        return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
