"""Where the rows of a cache lie: a directory for each device, and the device that keeps them there.

A device is opened when it is known where rows are computed on, which the first K and V of a model
show. What is wrong with a place shows when the cache is made all the same.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from .. import errors
from ..device.interface import RowDevice
from ..device.near_storage import NearStorageDevice
from ..device.registry import Devices, default_name, devices_in
from ..sizes import parse_size
from ..storage import NativeEngine
from .options import CacheOptions
from .striping import Storage, StripedDevices, directories_of

log = logging.getLogger(__name__)


class Places:
    """The directories of a cache, and the devices in them, open or to be opened.

    Args:
        storage: a directory, or several (one for each SSD).
        options: engine, device, compute, threads, read-ahead and deadline are for the devices.
        names: of the data files, to keep them; None: their space returns when the process ends.

    Attributes:
        striped: the devices as one.

    Raises what a device raises of a directory that it cannot use.
    """

    def __init__(self, storage: Storage, options: CacheOptions, names: Sequence[str] | None):
        self._files = [
            (directory, names[i] if names else None)
            for i, directory in enumerate(directories_of(storage))
        ]
        self._options = options
        self._compute = None if options.compute is None else torch.device(options.compute)
        made = (
            os.fspath(options.engine) if isinstance(options.engine, os.PathLike) else options.engine
        )
        self._engines = [made if isinstance(made, str) else made() for _ in self._files]
        #: None: it depends on where K and V turn out to be.
        self._devices = None if options.device is None else self._named(options.device)
        self.striped = StripedDevices(len(self._files), self._open_rows)
        if self._compute is not None or default_name(made, None) != "ssd":
            self.open(self._compute or torch.device("cuda"))
        else:
            checking = self._devices or self._named("ssd")
            for (directory, name), engine, near in zip(
                self._files, self._engines, checking, strict=True
            ):
                near.check(directory, engine=engine, name=name)

    def _named(self, device: Devices) -> list[NearStorageDevice]:
        return devices_in(device, [directory for directory, _ in self._files])

    def _open_rows(self, number: int, compute: torch.device) -> RowDevice:
        if self._devices is None:
            self._devices = self._named(default_name(self._engines[number], compute))
        (directory, name), near, options = self._files[number], self._devices[number], self._options
        log.debug(
            "rows in %s are kept by the device %s, computed on %s", directory, near.name, compute
        )
        if options.device == "gpu" and self._compute is None and compute.type == "cpu":
            raise errors.PathUnavailableError(
                "device 'gpu' for K and V in the CPU's memory",
                got="no GPU to compute on",
                expected="a model on a GPU",
                fix="model.to('cuda'), KVCache(..., compute='cuda'), or device='ssd'",
            )
        opened = near.open_rows(
            directory,
            compute=compute,
            engine=self._engines[number],
            name=name,
            threads=options.threads,
            deadline_s=options.deadline_s,
            read_ahead_bytes=parse_size(options.read_ahead_bytes),
        )
        if name is not None and not opened.capabilities.keeps:
            opened.close()
            raise errors.InvalidInputError(
                "a kept cache",
                got=f"device {near.name!r}, whose rows end with the process",
                fix="name=None",
            )
        return opened

    def open(self, compute: torch.device) -> None:
        """Opens the devices, unless they are open: rows are computed on in the memory of `compute`,
        unless the cache was told where.

        Raises what a device raises when it is opened.
        """
        self.striped.open(self._compute or compute)

    def open_for(self, model: torch.device) -> None:
        """The first K and V have come, and show where the model is. Raises what `open` raises,
        InvalidInputError for a model on several devices whose first layer came to the CPU."""
        if not self.striped.is_open:
            self.open(model)
        is_chosen = self._compute is not None or self._options.device is not None
        if model.type != "cpu" and not is_chosen and self.striped.devices[0].compute.type == "cpu":
            raise errors.InvalidInputError(
                "a model on several devices",
                got="its first layer on the CPU",
                fix="KVCache(..., compute='cuda')",
            )

    @property
    def data_files(self) -> list[str]:
        """The data files of a kept cache: one for each directory."""
        return [
            os.path.join(directory, name) for directory, name in self._files if name is not None
        ]

    @contextmanager
    def engine(self) -> Iterator[NativeEngine]:
        """An engine for what a kept cache has beside its rows."""
        engine = self._engines[0]
        if not isinstance(engine, str):
            yield engine
            return
        with NativeEngine(
            "auto" if engine in ("gds", "gds-compat") else engine, pool_bytes=1 << 20
        ) as own:
            yield own

    def close(self) -> None:
        """Closes what was opened here: devices that the caller opened stay open."""
        self.striped.close()
        if self._options.device is None or isinstance(self._options.device, str):
            for near in self._devices or []:
                near.close()
