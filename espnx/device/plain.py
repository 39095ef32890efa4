"""The devices of this machine as it is: its SSD beside its CPU, and beside a GPU."""

from __future__ import annotations

import os
from typing import Any

import torch

from .. import errors
from ..storage import Engine
from ..storage.native import host_engine
from .interface import READ_AHEAD_BYTES, RecordDevice, RowDevice
from .near_storage import NearStorageDevice
from .postings.interface import PostingLists, PostingsDevice
from .ssd_rows import SsdRowDevice
from .vectors.interface import ClusterDevice, Graph, GraphDevice


class PlainDevice(NearStorageDevice):
    """What the two share: rows in a file. See `espnx.device.interface.NearStorageDevice`."""

    rows: Any  # a class derived from RowFileDevice

    def check(self, directory: str | None = None, *, engine: Any = "auto", name: str | None = None) -> None:
        """See `NearStorageDevice`."""
        self.rows.check(directory or self.path, engine=engine, name=name)

    def open_rows(
        self,
        directory: str | None = None,
        *,
        compute: torch.device | None = None,
        engine: Any = "auto",
        name: str | None = None,
        read_ahead_bytes: int = READ_AHEAD_BYTES,
        threads: int | None = None,
        deadline_s: float = 30.0,
    ) -> RowDevice:
        """See `NearStorageDevice`."""
        return self.rows(
            directory or self.path, compute=compute, engine=engine, name=name, read_ahead_bytes=read_ahead_bytes, threads=threads,
            deadline_s=deadline_s,
        )  # fmt: skip

    def open_records(self, engine: Engine, compute: torch.device) -> RecordDevice:
        """See `NearStorageDevice`."""
        if compute.type != "cpu":
            from .gpu.records import TensorRecordDevice

            return TensorRecordDevice(engine, compute)
        from .ssd_records import SsdRecordDevice

        native = host_engine(engine)
        if native is None:
            raise errors.InvalidInputError("records would lie in GPU memory", got="compute='cpu'", fix="open the index with compute='cuda'")
        return SsdRecordDevice(native)

    def open_clusters(self, directory: str | os.PathLike[str], *, engine: Any = "auto", threads: int | None = None) -> ClusterDevice:
        """See `NearStorageDevice`."""
        from .clusters.device import SsdClusterDevice

        return SsdClusterDevice(directory, engine=engine, threads=threads)

    def open_graph(self, graph: Graph, *, engine: Any = "auto") -> GraphDevice:
        """See `NearStorageDevice`."""
        from .graph.device import SsdGraphDevice

        return SsdGraphDevice(graph, engine=engine)

    def open_postings(self, lists: PostingLists, *, engine: Any = "auto") -> PostingsDevice:
        """See `NearStorageDevice`."""
        from .postings.device import SsdPostingsDevice

        return SsdPostingsDevice(lists, engine=engine)


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
