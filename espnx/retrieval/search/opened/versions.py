"""The versions of a store that one index has open: the newest, which searches take, and older ones
while somebody still uses them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

from ...store.manifest import Manifest, read_store_manifest
from ..devices import IndexDevices
from .version import OpenOptions, OpenVersion


class OpenVersions:
    """See the module.

    Args:
        path, devices, options: of each `OpenVersion`.

    Attributes:
        newest: what `current` gives.
        changing: held while another version comes.

    Raises what `OpenVersion` raises.
    """

    def __init__(self, path: str, devices: IndexDevices, options: OpenOptions):
        self._path, self._devices, self._options = path, devices, options
        # one change at a time; which one is current
        self.changing, self._swapping = threading.Lock(), threading.Lock()
        self._retired: WeakSet[OpenVersion] = WeakSet()
        self.newest = self._open()

    def _open(self) -> OpenVersion:
        return OpenVersion(self._path, self._devices, self._options)

    @contextmanager
    def current(self) -> Iterator[OpenVersion]:
        """The newest version, which stays open meanwhile."""
        with self._swapping:
            version = self.newest
            version.hold()
        try:
            yield version
        finally:
            version.let_go()

    def reload(self, check: Callable[[Manifest, Manifest], None]) -> bool:
        """Switches to the newest version that is there; whether there was a newer one. To be called
        with `changing` held.

        `check`: of the new version's manifest and the old one's; where it raises, the old version
        stays.
        """
        newest = read_store_manifest(self._devices.native, self._path)
        live = self.newest.store.manifest
        if (newest.store_id, newest.generation) == (live.store_id, live.generation):
            return False
        version = self._open()
        try:
            check(version.store.manifest, live)
        except BaseException:
            version.close()
            raise
        with self._swapping:
            old, self.newest = self.newest, version
        self._retired.add(old)
        old.retire()
        return True

    def close(self) -> None:
        """All of them; no search may be under way."""
        for version in list(self._retired):
            version.close()  # somebody is still listing its ids
        self.newest.close()
