"""``espnx bench device``: what near-storage devices bring."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..harness.arguments import choices, positive, words
from ..harness.registry import Case, Say
from ..harness.result import Row

DESCRIPTION = """topology: a model decodes with K and V on emulated devices behind one link to the
host, in their own (virtual) time: with attention near storage alone, with writeback, with X rows,
with all of it; beside the same disks without it. search: an index in partitions on such devices,
whose best hits are merged; beside the same disks, whose records go to the host. postings: BM25 on
such devices that scan posting lists, placed by passages or by terms; beside the same disks, whose
lists go to the host. All are really stored, read and computed on; a run in which this machine took
more than a fifth of the time is repeated, stretched further, or refused. distances: how many
distances a second a device computes for the host, over threads and sizes of clusters, beside
FAISS's kernels on the same bytes in RAM. validation: whether this disk, emulated from a calibration
made anew before each run, takes as long as it does.

  espnx bench device --path /mnt/nvme --json device-topology.json  1 to 16 SmartSSDs
  espnx bench device --path /mnt/nvme --show search --json device-search.json
  espnx bench device --path /mnt/nvme --show postings --json device-postings.json
  espnx bench device --path /mnt/nvme --show distances --json device-distances.json
  espnx bench device --path /mnt/nvme --show validation --pairs 15 --json device-validation.json
  espnx bench device --quick                                       does everything work here?

topology takes 1 GiB of disk for each 65,000 tokens of the batch and layer, search 5 GB for each
million documents; nothing of it stays. --pairs is of distances and validation."""

SHOWS = ("topology", "search", "postings", "distances", "validation")
#: Unless --device says otherwise: the first of them attends, the second scans.
_DEVICES = {"topology": "smartssd", "search": "smartssd", "postings": "ragx"}


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
    add(
        "--show",
        metavar="S",
        choices=SHOWS,
        default="topology",
        help=", ".join(SHOWS) + " (default: %(default)s)",
    )
    add(
        "--device",
        metavar="SPEC",
        help="topology, search, postings: a preset or a spec (default: smartssd; postings: ragx)",
    )
    add(
        "--devices",
        metavar="N,...",
        default="1,2,4,8,16",
        help="topology, search, postings: how many (default: %(default)s)",
    )
    add(
        "--system",
        metavar="S,...",
        help="topology, search, postings: of all systems these (default: all)",
    )
    add(
        "--batch",
        type=int,
        metavar="N",
        default=16,
        help="topology: sequences; else: queries at a time (default: %(default)s)",
    )
    add(
        "--context",
        type=int,
        metavar="N",
        default=1024,
        help="topology: tokens before (default: %(default)s)",
    )
    add(
        "--layers",
        type=int,
        metavar="N",
        default=2,
        help="topology: of the model, 4 heads of 128 (default: %(default)s)",
    )
    add(
        "--documents",
        type=int,
        metavar="N",
        default=32_000,
        help="search, postings: in all partitions (default: %(default)s)",
    )
    add(
        "--candidates",
        type=int,
        metavar="N",
        default=1024,
        help="search: of a query (default: %(default)s)",
    )
    add(
        "--steps",
        type=int,
        metavar="N",
        default=5,
        help="topology: tokens that are timed; else: searches (default: %(default)s)",
    )
    add(
        "--record",
        metavar="DIR",
        help=(
            "topology, search, postings: write a trace of each system into DIR "
            "(DEVICES-SYSTEM.trace)"
        ),
    )
    add(
        "--stretch",
        type=float,
        metavar="F",
        default=60.0,
        help="wall seconds of a virtual one, with one device, to begin (%(default)s)",
    )


def run(args: Namespace, say: Say) -> list[Row]:
    """Measures. Raises what opening devices, generating, searching and measuring raise."""
    if args.show == "distances":
        from . import distances

        small: dict[str, Any] = {
            "cluster_bytes": (4096, 16384),
            "threads": (1, 2),
            "size_bytes": 8 << 20,
            "n_queries": 2,
            "clusters_per_query": 64,
        }
        return distances.measure(
            Path(args.path),
            pairs=args.pairs,
            seed=args.seed,
            say=say,
            **(small if args.quick else {}),
        )
    if args.show == "validation":
        from . import validation

        toy: dict[str, Any] = {
            "file_bytes": 8 << 20,
            "run_s": 0.02,
            "vectors": 500,
            "walks": 2,
            "layers": 2,
            "heads": 2,
            "tokens": 256,
        }
        runs = 2 if args.quick else args.pairs
        return validation.measure(
            validation.Work(Path(args.path), runs, seed=args.seed, **(toy if args.quick else {})),
            say,
        )
    from espnx.device.model.spec import load_spec

    from ..harness.traces import trace_folder
    from . import postings, search, topology
    from .emulated import Stretches

    spec, stretches = (
        load_spec(args.device or _DEVICES[args.show]),
        Stretches(args.stretch, say, is_checked=not args.quick),
    )
    of_show: dict[str, Mapping[str, Any]] = {
        "topology": topology.SYSTEMS,
        "search": search.SYSTEMS,
        "postings": postings.SYSTEMS,
    }
    known = list(of_show[args.show])
    systems = choices(args.system, known, "--system") if args.system else known
    counts = [1, 2] if args.quick else [positive("--devices", word) for word in words(args.devices)]
    where, record = Path(args.path), trace_folder(args.record)
    if args.show == "postings":
        passages, batch, searches = (
            (400, 2, 2) if args.quick else (args.documents, args.batch, args.steps)
        )
        asked = postings.Work(
            where, spec, passages, batch, searches, k=100, seed=args.seed, record=record
        )
        return postings.measure(asked, counts, systems, stretches, say)
    if args.show == "search":
        sizes = (
            (320, 2, 64, 2)
            if args.quick
            else (args.documents, args.batch, args.candidates, args.steps)
        )
        documents, batch, candidates, searches = sizes
        wanted = search.Work(
            where, spec, documents, batch, candidates, searches, k=10, seed=args.seed, record=record
        )
        return search.measure(wanted, counts, systems, stretches, say)
    batch, context, steps, layers, width = (
        (4, 96, 3, 1, 256)
        if args.quick
        else (args.batch, args.context, args.steps, args.layers, 512)
    )
    work = topology.Work(where, spec, batch, context, steps, layers, width, args.seed, record)
    return topology.measure(work, counts, systems, stretches, say)


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """A table of rows of one --show: those of the first."""
    from . import distances, postings, search, topology, validation

    tables = {
        "topology": topology.table,
        "search": search.table,
        "postings": postings.table,
        "distances": distances.table,
        "validation": validation.table,
    }
    show = rows[0].params["show"] if rows else "distances"
    return tables[show]([row for row in rows if row.params["show"] == show])


def leaves(directory: Path) -> list[Path]:
    """The files of clusters."""
    from .distances import FOLDER_NAME

    return sorted(directory.glob(f"{FOLDER_NAME}-*"))


CASE = Case(
    "device",
    "near-storage devices: emulated topologies, distances",
    configure,
    run,
    table,
    leaves=leaves,
)
