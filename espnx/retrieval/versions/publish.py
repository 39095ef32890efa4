"""The last step of everything that changes a store: what was written becomes a part of a new
manifest, in one rename."""

from __future__ import annotations

from ... import errors
from ...storage import NativeEngine
from ...storage.manifest import write_manifest
from ..store.manifest import MAGIC, Manifest
from ..store.part_file import VERSION
from . import generations


def publish(engine: NativeEngine, path: str, manifest: Manifest, replaced: Manifest | None) -> None:
    """Makes `manifest` the store's manifest, then removes what only the manifest before it referred
    to.

    Raises what writing raises: nothing was published; or WriteError that says "published": only the
    last flush failed.
    """
    before = generations.manifest_file(path)
    try:
        write_manifest(engine, path, MAGIC, VERSION, manifest.fields())
    except errors.StorageError as error:
        if generations.manifest_file(path) == before:
            raise
        # Nothing is removed: after a power cut the version before may be the one that is there.
        raise errors.WriteError(
            "cannot flush the directory of the new version",
            path=path,
            errno=error.errno,
            got=f"{error.got}: it is published, but not known to survive a power cut",
            fix=(
                "do not repeat the change; check the device, then compact (or change something "
                "else), which flushes again"
            ),
        ) from error
    generations.clean(path, manifest, replaced)
