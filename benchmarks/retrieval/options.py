"""The options of ``espnx bench retrieval``, read and checked."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from espnx.errors import InvalidInputError
from espnx.sizes import parse_size

from ..corpora.base import Expanded, ensure_base
from ..corpora.mixtures import MIXTURES, Corpus, Mixture
from ..corpora.stores import QUERIES, Prepared, ensure_store, found_store
from ..harness.arguments import choices, positive, words
from ..harness.registry import Say
from ..harness.traces import trace_folder
from ..machine.cgroup import check_limit_possible
from ..machine.throttle import parse_rate
from .fleet import Fleet, System
from .names import SHOWS, THROTTLED
from .point import baseline_system, espnx_systems, recorded_systems

NLIST, NLIST_LEAST = 4096, 16
QUICK_DOCUMENTS, QUICK_BASE, QUICK_QUERIES = 20_000, 200, 6
BATCHES = (1, 4, 12, 48, 192)


@dataclass(frozen=True)
class Options:
    """See the case's help."""

    path: Path
    shows: list[str]
    corpora: list[str]
    documents: int
    sizes: list[int]
    base: int
    dataset: Path | None
    limits: list[int | None]
    baselines: list[System]
    systems: list[System]
    nprobe: str
    candidates: int
    reranks: list[int | None]
    batches: list[int]
    threads: int | None
    first_stage_code: str
    formats: list[str]
    coarse: str | None
    cascades: list[int]
    encoder: str
    pca: int
    layouts: list[str]
    queries: int
    engine: str
    seed: int
    quick: bool
    throttle: int | None = None

    @property
    def nlist(self) -> int:
        """4096 for a million documents, in proportion for fewer."""
        return max(NLIST_LEAST, min(NLIST, self.documents * NLIST // 1_000_000))

    def build_options(self, **more: Any) -> Mapping[str, Any]:
        return {
            "format": self.formats[0],
            "first_stage_code": self.first_stage_code,
            "nlist": self.nlist,
            "coarse": self.coarse,
            **more,
        }

    def corpus(self, name: str, say: Say) -> Corpus | None:
        """None for the folder of a store: what it was made from is not known."""
        if name in MIXTURES:
            return Mixture(name, self.documents, MIXTURES[name])
        return (
            Expanded(ensure_base(self.path, self.base, say), self.documents)
            if name == "A"
            else None
        )

    def of_sizes(self, name: str) -> list[Options]:
        """The same with each number of documents; once for the folder of a store, which has as many
        as it has."""
        return (
            [replace(self, documents=size) for size in self.sizes]
            if name in ("A", *MIXTURES)
            else [self]
        )

    def prepare(self, name: str, say: Say, **more: Any) -> Prepared:
        """The store of a corpus, built if need be. `more`: build options."""
        corpus = self.corpus(name, say)
        if corpus is None:
            return found_store(Path(name))
        return ensure_store(self.path, name, corpus, self.build_options(**more), say)


def read_options(args: Namespace) -> Options:
    """Raises InvalidInputError, and PathUnavailableError where memory should be limited and cannot
    be."""
    path = Path(args.path)
    shows, quick = choices(args.show, SHOWS, "--show"), args.quick
    corpora = words(args.corpus)
    for name in corpora:
        if name not in ("A", *MIXTURES) and not Path(name).is_dir():
            raise InvalidInputError(
                "corpus", got=repr(name), expected="A, B, C, or the folder of a store"
            )
    limits = [None if word == "ample" else parse_size(word) for word in words(args.memory)]
    for limit in limits:
        if limit is not None:
            check_limit_possible(limit)
    throttle = parse_rate(args.throttle) if args.throttle else None
    if throttle and (others := sorted(set(shows) - set(THROTTLED))):
        raise InvalidInputError(
            "--throttle", got=f"--show {','.join(others)}", expected=", ".join(THROTTLED)
        )
    sizes = [positive("docs", word) for word in words(args.docs) or [args.docs]]
    sizes = list(dict.fromkeys(min(size, QUICK_DOCUMENTS) if quick else size for size in sizes))
    queries = min(args.queries, QUICK_QUERIES) if quick else args.queries
    if not 1 <= queries <= QUERIES // 2:
        raise InvalidInputError("queries", got=queries, expected=f"1 to {QUERIES // 2}")
    return Options(
        path=path.resolve(),
        shows=shows,
        corpora=corpora,
        documents=sizes[0],
        sizes=sizes,
        base=positive("base", min(args.base, QUICK_BASE) if quick else args.base),
        dataset=Path(args.dataset) if args.dataset else None,
        limits=limits,
        baselines=[baseline_system(name) for name in words(args.baseline)],
        systems=espnx_systems(words(args.prefetch_step))
        + recorded_systems(trace_folder(args.record)),
        nprobe=args.nprobe,
        candidates=positive("candidates", args.candidates),
        reranks=[
            None if word == "all" else positive("rerank", word) for word in words(args.rerank)
        ],
        batches=[positive("batch", word) for word in words(args.batch)],
        threads=args.threads,
        first_stage_code=args.first_stage_code,
        formats=words(args.format or ("all" if shows == ["formats"] else "fp16")),
        coarse=None if args.coarse == "none" else args.coarse,
        cascades=[positive("cascade", word) for word in words(args.cascade)],
        encoder=args.encoder,
        pca=positive("pca", args.pca),
        layouts=words(args.layout),
        queries=queries,
        engine=args.engine,
        seed=args.seed,
        quick=quick,
        throttle=throttle,
    )


def resolve_nprobe(options: Options, fleet: Fleet, queries: list[int]) -> int:
    """``--nprobe`` as a number of lists: as it is, the store's own, or the least that gives a
    recall for these queries."""
    text, system = options.nprobe, fleet.systems[0]
    if text == "auto":
        return int(fleet.facts(system)["default_nprobe"])
    if text.isdigit() and int(text):
        return int(text)
    try:
        recall = float(text)
    except ValueError:
        recall = -1.0
    if not 0 < recall < 1:
        raise InvalidInputError(
            "nprobe", got=repr(text), expected="auto, a whole number, or a recall such as 0.95"
        )
    return int(
        fleet.worker_of(system).ask(
            "nprobe_for", queries=queries, candidates=options.candidates, recall=recall
        )["nprobe"]
    )
