"""``espnx bench graph``: nearest neighbours from SSD at equal recall, beside DiskANN, FAISS and
LanceDB."""

from __future__ import annotations

import os
import shutil
import subprocess
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from espnx.errors import InvalidInputError

from ..harness.arguments import choices, positive, words
from ..harness.registry import Case, Say
from ..harness.result import Row
from .names import SYSTEMS

if TYPE_CHECKING:
    from .data import Data

DESCRIPTION = """sweep: every system builds an index of the same vectors and searches it with lists
of many sizes (L; efSearch of HNSW, nprobe of inverted lists, of LanceDB with as many candidates
refined): recall@10 against exact neighbours, reads and bytes of a query, queries a second, times of
a query alone, memory, folder, build. A summary compares at recall .95 and .99, between two list
sizes by a straight line: queries a second with the best threads and W of each, pass by pass; reads
with W = 1 and PQ codes of as many bytes (espnx-inline-pq: of the vectors as they are, as DiskANN's
are, and not rotated; espnx-inline-full: as many as fill the page; espnx-inline-fast: the same,
built with a list of 50 in place of 100; espnx-paged: with those of code pages, of which 5 MiB are
kept). memory: above that of a process that has opened nothing, with 64 queries under way, over --n.

clusters: pages of a query, its CPU time and memory over the number of clusters (a graph each),
beside as many graphs of shares of the vectors (blind sharding), of which each is asked for as few
neighbours by as short a list as reach the recall, or (-k) for ten; every list through every number
of clusters, between two by a straight line; "by recall=": as the build measured it.

changes: a fifth of the vectors is deleted, others are added, and both are merged, in ten rounds, in
ten series of other vectors: recall and pages at the lists with which a graph that is built of the
same vectors finds .90, .95 and .99, beside it; the drift of recall and pages round by round; time,
memory and bytes written of a merge, beside a build; CPU of searches with a tenth as many additions
that are not merged, once the graph of these in memory is whole (it grows by searches), in turns
with searches without. With --clusters the graph has a graph for each of so many, and pages are
those of the cheapest search that finds as much, of every list through every number of clusters.

  espnx bench graph --path /mnt/nvme --diskann-python ENV/bin/python --json graph.json
  python scripts/graph_vectors.py tokens --out tokens
  espnx bench graph --base tokens.npy --queries tokens-queries.npy --pq-bytes 47
  espnx bench graph --path /mnt/nvme --base sift.fbin --queries sift-queries.fbin --pq-bytes 32
  espnx bench graph --path /mnt/nvme --show memory --n 10000,100000 \\
      --system espnx-inline,espnx-memory
  espnx bench graph --path /mnt/nvme --show clusters --clusters 16,64,256
  espnx bench graph --path /mnt/nvme --show changes --n-queries 1000
  espnx bench graph --path /mnt/nvme --show changes --clusters 16 --n 32000 --n-queries 1000
  espnx bench graph --path /mnt/nvme --show lists --n-queries 1000
  # does everything work here?
  espnx bench graph --quick

Vectors by recipe: hard, 100 overlapping clusters in 24 dimensions, as 128 (--dim) float32 with
noise; rc, a Gaussian centre in 32 dimensions for every 50 vectors, with more noise; as uint8 each
value rounded to one of 256 steps over four standard deviations to both sides. DiskANN is
diskannpy-rust (or diskannpy), in an environment of its own: python -m venv ENV; ENV/bin/pip install
diskannpy-rust. LanceDB, in ours: pip install lancedb. What is not installed has a row that says so,
and nothing stays on disk."""

LIST_SIZES = "10,14,18,22,28,34,42,56,80,120"
K = 10
#: Numbers of clusters, and vectors of one.
CLUSTERS = "16,64,256"
PER_CLUSTER, PER_CLUSTER_QUICK = 2000, 200
#: Of the thesis' mixes, and those of a query.
DEVICE_LISTS, DEVICE_LISTS_QUICK, LISTS_PER_QUERY = 8192, 200, 64
SHOWS = ("sweep", "memory", "clusters", "changes", "lists")


def configure(parser: ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "--path",
        metavar="DIR",
        default=".",
        help="a directory on the SSD (default: the current one)",
    )
    _add_shows(parser)
    _add_lists_options(parser)
    add("--system", metavar="S,...", help=f"of {', '.join(SYSTEMS)} (default: all)")
    add("--n", metavar="N,...", default="50000", help="vectors by recipe (default: %(default)s)")
    add("--dim", metavar="N", default="128", help="of vectors by recipe (default: %(default)s)")
    add(
        "--dtype",
        choices=("float32", "uint8"),
        default="float32",
        help="of vectors by recipe (default: %(default)s)",
    )
    add(
        "--base",
        metavar="FILE",
        help="vectors instead: .npy, .fbin, .u8bin, .fvecs, ... (with --queries)",
    )
    add("--queries", metavar="FILE", help="their queries")
    add("--n-queries", metavar="N", default="5000", help="at most (default: %(default)s)")
    add(
        "--pq-bytes",
        metavar="N",
        default="32",
        help="of a code, DiskANN's and espnx's (default: %(default)s)",
    )
    add("--list-sizes", metavar="L,...", default=LIST_SIZES, help="(default: %(default)s)")
    add(
        "--threads",
        metavar="N",
        default=str(os.cpu_count()),
        help="of builds and of FAISS (default: all cores)",
    )
    add(
        "--search-threads",
        metavar="T,...",
        default="2,4,8",
        help="of espnx's searches: the best counts (default: %(default)s)",
    )
    add("--diskann-python", metavar="PYTHON", help="of the environment that has diskannpy")
    add(
        "--diskann-threads",
        metavar="T,...",
        default="8,16,32,64,128",
        help="the best counts (default: %(default)s)",
    )
    add(
        "--diskann-beam-widths",
        metavar="W,...",
        default="1,2,4,8",
        help="the best counts (default: %(default)s)",
    )

    add("--diskann-list-sizes", metavar="L,...", help="(default: those of --list-sizes)")
    add(
        "--pass-seconds",
        metavar="S",
        default="2",
        help="queries are asked again until a pass takes so long (default: %(default)s)",
    )


def _add_lists_options(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("of --show lists").add_argument
    add("--recipe", metavar="R,...", default="hard,rc", help="of vectors (default: %(default)s)")
    add(
        "--packing",
        metavar="P,...",
        default="order,best-fit,co-access",
        help="of lists into pages (default: %(default)s)",
    )
    add(
        "--list-page-bytes",
        metavar="N,...",
        default="4096,16384",
        help="pages of flash that lists are packed into (default: %(default)s)",
    )
    add(
        "--list-dtype",
        metavar="T,...",
        default="float16,int8",
        help="that vectors in lists are stored as (default: %(default)s)",
    )
    add("--mix", metavar="M,...", default="sift,spacev", help="of sizes (default: %(default)s)")
    add(
        "--list-threads",
        metavar="T,...",
        default="1,2,4,8,16,32",
        help="of the host, beside devices (default: %(default)s)",
    )


def _add_shows(parser: ArgumentParser) -> None:
    """What is shown, and options of some shows alone."""
    add = parser.add_argument
    add(
        "--show",
        choices=SHOWS,
        default="sweep",
        help=f"{', '.join(SHOWS[:-1])} or {SHOWS[-1]} (default: %(default)s)",
    )
    add(
        "--clusters",
        metavar="N,...",
        help="of --show clusters, 2,000 vectors in each (default: 16,64,256); of --show changes "
        "one number: a graph with so many (default: one graph)",
    )
    add(
        "--replicas",
        metavar="SHARE,...",
        default="0",
        help="of --show clusters: vectors in two clusters (default: %(default)s)",
    )
    add(
        "--rounds",
        metavar="N",
        default="10",
        help="of --show changes, in which a fifth is replaced (default: %(default)s)",
    )
    add(
        "--series",
        metavar="N",
        default="10",
        help="of such rounds, each of other vectors (default: %(default)s)",
    )


def run(args: Namespace, say: Say) -> list[Row]:
    """Measures. Raises what reading, building and searching raise, and InvalidInputError for
    options that make no sense."""
    from .measure import Plan, measure

    if (args.base is None) != (args.queries is None):
        raise InvalidInputError(
            "--base and --queries", got="one of them", expected="both, or neither"
        )
    if args.show == "clusters":
        return _clusters(args, say)
    if args.show == "changes":
        return _changes(args, say)
    if args.show == "lists":
        return _lists(args, say)
    quick, python = args.quick, args.diskann_python
    if python is not None:
        # Processes start in another directory. Not resolved: by the link an environment's Python
        # finds its packages.
        python = os.path.abspath(shutil.which(python) or python)
        _check_peer(python)
    plan = Plan(
        path=Path(args.path).resolve(),
        systems=choices(args.system, SYSTEMS, "--system") if args.system else SYSTEMS,
        peer=python,
        pq_bytes=positive("--pq-bytes", args.pq_bytes),
        threads=positive("--threads", args.threads),
        own_threads=(2,) if quick else _many("--search-threads", args.search_threads),
        peer_threads=(2,) if quick else _many("--diskann-threads", args.diskann_threads),
        peer_beam_widths=(1, 2)
        if quick
        else _many("--diskann-beam-widths", args.diskann_beam_widths),
        list_sizes=(10, 80) if quick else sorted(_many("--list-sizes", args.list_sizes)),
        peer_list_sizes=(10, 80)
        if quick
        else sorted(_many("--diskann-list-sizes", args.diskann_list_sizes or args.list_sizes)),
        pass_s=0.0 if quick else positive("--pass-seconds", args.pass_seconds),
        pairs=args.pairs,
        seed=args.seed,
    )
    if plan.list_sizes[0] < K:
        raise InvalidInputError(
            "--list-sizes",
            got=plan.list_sizes[0],
            expected=f"{K}, the neighbours asked for, or more",
        )
    return measure(_sets(args), plan, args.show, say)


def _check_peer(python: str) -> None:
    """Before anything is built: who names the environment wants DiskANN beside the others."""
    try:
        answer = subprocess.run(
            [python, "-c", "import diskannpy"], capture_output=True, text=True, check=False
        )
        last = (answer.stderr.strip() or f"exit code {answer.returncode}").splitlines()[-1]
        problem = last if answer.returncode else ""
    except OSError as error:
        problem = str(error)
    if problem:
        raise InvalidInputError(
            "--diskann-python",
            got=f"{python}: {problem}",
            expected="the Python of an environment that has diskannpy",
            fix=f"{python} -m pip install diskannpy-rust",
        )


def _clusters(args: Namespace, say: Say) -> list[Row]:
    from .clusters import ClusterPlan, measure_clusters
    from .data import by_recipe

    counts = [2, 4] if args.quick else _many("--clusters", args.clusters or CLUSTERS)
    plan = ClusterPlan(
        Path(args.path).resolve(),
        counts,
        PER_CLUSTER_QUICK if args.quick else PER_CLUSTER,
        [_share("--replicas", word) for word in words(args.replicas)],
        positive("--threads", args.threads),
    )
    n_queries = 20 if args.quick else positive("--n-queries", args.n_queries)
    dim = positive("--dim", args.dim)
    return measure_clusters(
        lambda n: by_recipe(n, n_queries, K, args.seed, dim=dim, dtype=args.dtype), plan, say
    )


def _changes(args: Namespace, say: Say) -> list[Row]:
    from .changes import SYSTEMS as KINDS
    from .changes import ChangesPlan, measure_changes
    from .clusters import OURS as CLUSTERED
    from .data import by_recipe

    clusters = None if args.clusters is None else positive("--clusters", args.clusters)
    kinds = KINDS if clusters is None else (CLUSTERED,)
    chosen = choices(args.system, kinds, "--system") if args.system else kinds
    plan = ChangesPlan(
        Path(args.path).resolve(),
        chosen[-1:] if args.quick else chosen,
        2 if args.quick else positive("--rounds", args.rounds),
        1 if args.quick else positive("--series", args.series),
        (0.1,) if args.quick else (0.02, 0.1),
        args.pairs,
        positive("--threads", args.threads),
        clusters,
    )
    n_queries = 20 if args.quick else positive("--n-queries", args.n_queries)
    dim = 16 if args.quick else positive("--dim", args.dim)
    return [
        row
        for n in ([400] if args.quick else _many("--n", args.n))
        for row in measure_changes(
            lambda count, series: by_recipe(
                count, n_queries, K, args.seed + series, dim=dim, dtype=args.dtype
            ),
            n,
            plan,
            say,
        )
    ]


def _lists(args: Namespace, say: Say) -> list[Row]:
    from espnx.clusters import PACKINGS
    from espnx.clusters.options import DTYPES

    from .data import LIST_MIXES, RECIPES
    from .list_devices import DevicesPlan, measure_devices
    from .lists import ListsPlan, measure_lists

    quick, path = args.quick, Path(args.path).resolve()
    plan = ListsPlan(
        path,
        choices(args.packing, PACKINGS, "--packing"),
        [4096] if quick else _many("--list-page-bytes", args.list_page_bytes),
        ["float16"] if quick else choices(args.list_dtype, tuple(DTYPES), "--list-dtype"),
        positive("--threads", args.threads),
        args.seed,
        0.0 if quick else 0.3,
    )
    recipes = choices(args.recipe, RECIPES, "--recipe")
    devices = DevicesPlan(
        path,
        choices(args.mix, tuple(LIST_MIXES), "--mix"),
        DEVICE_LISTS_QUICK if quick else DEVICE_LISTS,
        2 if quick else 32,
        8 if quick else LISTS_PER_QUERY,
        [1, 3] if quick else _many("--list-threads", args.list_threads),
        args.pairs,
        args.seed,
    )
    sets = (each for recipe in recipes for each in _sets(args, recipe))
    return measure_lists(sets, plan, say) + measure_devices(devices, say)


def _share(name: str, text: str) -> float:
    try:
        if 0 <= float(text) <= 1:
            return float(text)
    except ValueError:
        pass
    raise InvalidInputError(name, got=text, expected="shares, 0 to 1")


def _many(name: str, text: str) -> list[int]:
    return [positive(name, word) for word in words(text)]


def _sets(args: Namespace, recipe: str = "hard") -> Iterator[Data]:
    from .data import by_recipe, from_files

    n_queries = 20 if args.quick else positive("--n-queries", args.n_queries)
    if args.base is not None:
        yield from_files(args.base, args.queries, n_queries, K)
        return
    for n in [700] if args.quick else _many("--n", args.n):
        yield by_recipe(
            n,
            n_queries,
            K,
            args.seed,
            dim=positive("--dim", args.dim),
            dtype=args.dtype,
            recipe=recipe,
        )


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """A table of rows of one show: those of the first."""
    from .changes import DRIFT, MERGE, SEARCH, changes_table, drift_table, merge_table, search_table
    from .clusters import clusters_table
    from .list_devices import devices_table
    from .lists import lists_table
    from .rows import memory_table, summary_table, sweep_table

    show = rows[0].params["show"] if rows else "summary"
    tables = {
        "summary": summary_table,
        "sweep": sweep_table,
        "memory": memory_table,
        "clusters": clusters_table,
        "changes": changes_table,
        DRIFT: drift_table,
        MERGE: merge_table,
        SEARCH: search_table,
        "lists": lists_table,
        "list-devices": devices_table,
    }
    return tables[show]([row for row in rows if row.params["show"] == show])


CASE = Case(
    "graph",
    "nearest neighbours from SSD at equal recall, beside DiskANN, FAISS and LanceDB",
    configure,
    run,
    table,
)
