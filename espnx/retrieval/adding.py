"""What an addition takes from the store that it adds to: lists, codebooks, projection, and the place after the last record."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from .deleting import Deletion
from .first_stage import load_faiss
from .pooling import Pooling
from .projection import Projection
from .store import GROUP_RECORDS, EmbeddingStore


@dataclass(frozen=True)
class Base:
    """A published store, as the start of an addition. Nothing is trained again: new documents go into the lists that are there.

    Attributes:
        manifest: of the store.
        first_number: of the new part.
        tensors: codebooks, as a base part's metadata names them.
        replaced: what the added documents take the place of; goes in the version that they come in.
    """

    manifest: dict[str, Any]
    first_number: int
    projection: Projection | None
    pooling: Pooling | None
    tensors: dict[str, np.ndarray]
    replaced: Deletion
    _index: Any

    @classmethod
    def of(cls, store: EmbeddingStore, replaced: Deletion) -> Base:
        """Raises what reading the store's index raises."""
        tensors = {name: tensor for name, tensor in store.parts[0].meta.items() if name.startswith(("full.", "compact."))}
        first_number = -(-store.end_number // GROUP_RECORDS) * GROUP_RECORDS
        return cls(store.manifest, first_number, store.projection, store.pooling, tensors, replaced, store.load_index())

    @property
    def generation(self) -> int:
        """Of the base part: it seeds the checksums of all parts."""
        return int(self.manifest["base_generation"])

    def empty_index(self) -> Any:
        """The store's index, trained, without entries."""
        index = load_faiss().clone_index(self._index)
        index.reset()
        return index

    def extended(self, entry: dict[str, Any], tokens: int) -> dict[str, Any]:
        """The store's manifest with one more part."""
        contents = contents_of(self.manifest)
        contents["generation"] = entry["generation"]
        contents["records"]["count"] += entry["count"]
        contents["records"]["tokens"] += tokens
        contents["parts"].append(entry)
        return contents


def contents_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """The fields of a manifest that its writer does not add itself, as a copy."""
    own = ("magic", "version", "byte_order", "checksum")
    return {key: copy.deepcopy(value) for key, value in manifest.items() if key not in own}
