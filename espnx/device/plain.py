"""The devices of this machine as it is: its SSD beside its CPU, and beside a GPU."""

from __future__ import annotations

import os
from typing import Any

import torch

from .. import errors
from .kinds import KINDS, ROWS, PartKind
from .near_storage import NearStorageDevice
from .rows.data_file import check_place
from .rows.ssd import SsdRowDevice


class PlainDevice(NearStorageDevice):
    """What the two share: rows in a file. See `espnx.device.interface.NearStorageDevice`."""

    kinds = KINDS
    rows: Any  # a class derived from RowFileDevice

    def check(
        self, directory: str | None = None, *, engine: Any = "auto", name: str | None = None
    ) -> None:
        """See `NearStorageDevice`."""
        check_place(directory or self.path, engine=engine, name=name)

    def offers(self, kind: PartKind) -> bool:
        """See `NearStorageDevice`. Of kinds that others bring, whatever this machine can open."""
        return kind in self.kinds or kind not in KINDS

    def open_part(self, kind: PartKind, *what: Any, **options: Any) -> Any:
        """See `NearStorageDevice`."""
        return (
            self.rows(what[0] or self.path, **options)
            if kind is ROWS
            else kind.open(self.path, *what, **options)
        )


class SsdDevice(PlainDevice):
    """This machine's SSD: rows are computed on by its CPU, records wherever they are wanted."""

    name = "ssd"
    rows = SsdRowDevice
    capabilities = SsdRowDevice.capabilities


class GpuDevice(PlainDevice):
    """This machine's SSD beside a GPU, in whose memory rows are computed on."""

    name = "gpu"

    def __init__(self, path: str | os.PathLike[str]):
        from .gpu.rows import GpuRowDevice  # its kernels are not for every machine

        super().__init__(path)
        self.rows = GpuRowDevice
        self.capabilities = GpuRowDevice.capabilities

    def open_part(self, kind: PartKind, *what: Any, **options: Any) -> Any:
        """See `NearStorageDevice`. Raises PathUnavailableError for anything but rows on a machine
        without a GPU (rows say themselves where they are computed on)."""
        if kind is not ROWS and not torch.cuda.is_available():
            raise errors.PathUnavailableError(
                f"device 'gpu' for {kind.keeps}",
                got="no CUDA device here",
                expected="a GPU to compute on",
                fix="device='ssd'",
            )
        return super().open_part(kind, *what, **options)
