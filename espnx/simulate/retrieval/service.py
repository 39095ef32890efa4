"""A service's specs together, with the values that their figures have in one run."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from ...device.model.reader import SUFFIXES
from ...device.model.spec import DeviceSpec, load_spec
from ...errors import InvalidInputError
from ..figures import Range
from ..specs.kinds import GpuSpec, NetworkSpec
from ..specs.load import as_range, figures, load
from ..specs.rag import GenerationSpec, GraphWalkSpec, RetrieverSpec, SearcherSpec, ServiceSpec

#: What can be switched off, for the question what it makes.
MECHANISMS = (
    "reads",  # of drives take no time, wherever
    "reads one by one",  # those of a host take what their bytes take
    "cells",  # flash in the drive is read in no time
    "comparing",  # takes no time
    "network",  # takes no time
    "encoding",  # takes no time
    "generation",  # takes no time
)
#: A fitted figure's name among the others, by what it is of.
FITTED = ("xeon-8175m.distance", "xeon-8175m.posting")


@dataclass(frozen=True)
class Service:
    """Attributes:
    service, retriever, walk, encoder, searcher, generation, gpu, network: specs.
    device: of the drives; None: there are none.
    values: of their figures, by names that `Specs.ranges` has, and of `FITTED`.
    without: of `MECHANISMS`, what it does not have.
    """

    service: ServiceSpec
    retriever: RetrieverSpec
    walk: GraphWalkSpec
    encoder: SearcherSpec
    searcher: SearcherSpec
    generation: GenerationSpec
    gpu: GpuSpec
    network: NetworkSpec
    device: DeviceSpec | None
    values: Mapping[str, float]
    without: str | None = None

    @property
    def n_drives(self) -> int:
        drives = self.service.drives
        return 1 if drives is None else int(drives.count.value)

    @property
    def is_near_storage(self) -> bool:
        return self.service.flash is not None

    def get(self, name: str, default: float | None = None) -> float:
        """The value of a figure, such as ``searcher.hop``. Raises InvalidInputError: it is not
        known, and has no default."""
        kind, _, path = name.partition(".")
        found = self.values.get(f"{getattr(self, kind).name}.{path}", default)
        if found is None:
            raise InvalidInputError(
                f"what {self.service.name} is computed with", got=f"no {name}", expected="given"
            )
        return found


@dataclass(frozen=True)
class Specs:
    """Those of one service and one retriever, without values."""

    service: ServiceSpec
    retriever: RetrieverSpec
    walk: GraphWalkSpec
    encoder: SearcherSpec
    searcher: SearcherSpec
    generation: GenerationSpec
    gpu: GpuSpec
    network: NetworkSpec
    device: DeviceSpec | None

    @functools.cached_property
    def ranges(self) -> dict[str, Range]:
        """The ranges of all figures, by the name of their spec and the fields that lead to them."""
        found: dict[str, Range] = {}
        for spec in vars(self).copy().values():
            if spec is not None:
                found |= {name: as_range(each) for name, each in figures(spec, spec.name).items()}
        return found

    def given(self, values: Mapping[str, float], without: str | None = None) -> Service:
        if without is not None and without not in MECHANISMS:
            raise InvalidInputError("a mechanism", got=without, expected=", ".join(MECHANISMS))
        specs = {name: each for name, each in vars(self).items() if name != "ranges"}
        return Service(**specs, values=values, without=without)


def load_service(source: str, retriever: str, generation: str = "llama2-34b") -> Specs:
    """A service by name or path, with all that it is made of.

    Raises:
        InvalidInputError: a name that is none; a network for a retriever that has no weights.
        FileMissingError, ReadError, FormatError: as they say.
    """
    service = load(ServiceSpec, source)
    beside = source if source.endswith(SUFFIXES) else None
    after = load(GenerationSpec, generation)
    after_beside = generation if generation.endswith(SUFFIXES) else None
    return Specs(
        service,
        load(RetrieverSpec, retriever),
        load(GraphWalkSpec, "hnsw"),
        load(SearcherSpec, service.encoder, beside),
        load(SearcherSpec, service.searcher, beside),
        after,
        load(GpuSpec, after.gpu, after_beside),
        load(NetworkSpec, after.network, after_beside),
        None if service.drives is None else load_spec(service.drives.device),
    )


#: Those that come along, each read once.
load_preset_service = functools.cache(load_service)
