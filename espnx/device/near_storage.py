"""Storage at a directory, and what computes beside it: what `espnx.device.open` gives, and a device
of another package derives from."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self, TypeVar

import torch

from .. import errors
from ..storage import Engine
from .clusters.layout import ClusterSections
from .interface import READ_AHEAD_BYTES, Capabilities, RecordDevice, RowDevice
from .kinds import CLUSTERS, GRAPHS, POSTINGS, RECORDS, ROWS, PartKind
from .postings.interface import PostingLists, PostingsDevice
from .vectors.encoding import Encoding, encode_on_host
from .vectors.interface import ClusterDevice, Graph, GraphDevice

T = TypeVar("T")


class NearStorageDevice:
    """Storage at a directory, and what computes beside it: opened by name (`espnx.device.open`),
    asked for its parts.

    A device of another package derives from it and overrides what it can do; what it does not, a
    typed error says. Nothing is read or written before one of its parts is opened.

    Args:
        path: the directory in which it keeps what it is given.

    Attributes:
        name: by which it was opened.
        path: as given.
        kind: of its times: ``plain`` ones are this machine's, ``emulated`` ones those of another
            device (docs/device-specs.md).
        capabilities: of its rows.
        kinds: of parts that `open_part` opens (`espnx.device.kinds`), beside those that have a call
            of their own here.
    """

    name: str = ""
    kind: Literal["plain", "emulated"] = "plain"
    capabilities = Capabilities()
    kinds: Sequence[PartKind] = ()

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)

    @classmethod
    def together(cls, paths: Sequence[str | os.PathLike[str]], **options: Any) -> Sequence[Self]:
        """One for each path. Devices that share something (a switch, a link to the host) are made
        here; others do not override it."""
        return [cls(path, **options) for path in paths]

    def check(
        self, directory: str | None = None, *, engine: Any = "auto", name: str | None = None
    ) -> None:
        """Whether rows could be opened there, as far as that can be told before: raises what
        `open_rows` would, leaves no file behind."""

    def open_part(self, kind: PartKind, *what: Any, **options: Any) -> Any:
        """A part of any kind: what the calls below come to. Its arguments are those of the kind's
        own call. Raises InvalidInputError."""
        raise errors.InvalidInputError(
            f"{kind.keeps} on device {self.name!r}",
            got="a device that does not keep them",
            fix="device='ssd'",
        )

    def offers(self, kind: PartKind) -> bool:
        """Whether it opens such parts."""
        return kind in self.kinds or getattr(type(self), kind.opens, None) is not getattr(
            NearStorageDevice, kind.opens, None
        )

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
        """A place for the rows of one KV cache.

        Args:
            directory: of the data file, in `path`; None: `path`.
            compute: in whose memory rows are computed on; None: the device's own choice.
            engine: the path that bytes are to take, by name (`auto` alone may fall back), or a
                storage engine.
            name: of the data file, to keep it; None: its space returns when the process ends.
            read_ahead_bytes: of rows that are read before they are asked for.
            threads: that compute on the host; None: as many as PyTorch uses.
            deadline_s: of each transfer.

        Raises:
            InvalidInputError: what this device cannot do.
            WriteError, PathUnavailableError: the directory or the path cannot be used.
        """
        found: RowDevice = self.open_part(
            ROWS,
            directory,
            compute=compute,
            engine=engine,
            name=name,
            read_ahead_bytes=read_ahead_bytes,
            threads=threads,
            deadline_s=deadline_s,
        )
        return found

    def open_records(self, engine: Engine, compute: torch.device) -> RecordDevice:
        """Opens records that `engine` reads, to be scored on `compute`. The engine stays the
        caller's. Raises InvalidInputError."""
        found: RecordDevice = self.open_part(RECORDS, engine, compute)
        return found

    def open_clusters(
        self,
        source: str | os.PathLike[str] | ClusterSections,
        *,
        engine: Any = "auto",
        threads: int | None = None,
    ) -> ClusterDevice:
        """Opens clusters, for distances of their vectors.

        Args:
            source: a directory of them (`espnx.device.clusters.write_clusters`), or sections of
                another file.
            engine: the path that bytes are to take, or a storage engine.
            threads: that compute on the host; None: as many as PyTorch uses.

        Raises InvalidInputError; what reading the clusters' manifest does.
        """
        found: ClusterDevice = self.open_part(CLUSTERS, source, engine=engine, threads=threads)
        return found

    def open_graph(self, graph: Graph, *, engine: Any = "auto") -> GraphDevice:
        """Opens a graph whose files lie on the device, for walks over it. Raises InvalidInputError;
        what opening the files does."""
        found: GraphDevice = self.open_part(GRAPHS, graph, engine=engine)
        return found

    def open_postings(self, lists: PostingLists, *, engine: Any = "auto") -> PostingsDevice:
        """Opens posting lists whose files lie on the device, for scans. Raises InvalidInputError;
        what opening the files does."""
        found: PostingsDevice = self.open_part(POSTINGS, lists, engine=engine)
        return found

    def encode(
        self,
        encode: Callable[[Sequence[str]], T],
        texts: Sequence[str],
        *,
        flop: float | None = None,
    ) -> Encoding[T]:
        """Makes vectors of texts beside the storage they are looked up in (RAGX, section 3): by the
        host's cores where the device has no processor of its own, and the result says so.

        Args:
            encode: makes vectors of texts.
            flop: floating-point operations that this takes
                (`espnx.device.vectors.encoding.forward_flop`).

        Raises InvalidInputError; what `encode` raises.
        """
        return encode_on_host(encode, texts, flop=flop)

    def refuses(self, kind: PartKind) -> str:
        """Why this device opens no part of a kind that its class offers, whatever it is given;
        empty: it does."""
        return ""

    def describe(self) -> dict[str, Any]:
        """What it is, for people: `espnx device info`."""
        return {"name": self.name, "path": self.path, "kind": self.kind}

    def close(self) -> None:
        """Ends what its parts share. They are closed before. May be called again."""
