"""``espnx bench device``: what near-storage devices bring."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..harness.arguments import choices, positive, words
from ..harness.registry import Case, Say
from ..harness.result import Row

DESCRIPTION = """topology: a model decodes with K and V on emulated devices behind one link to the host, in their own (virtual) time: with
attention near storage alone, with writeback, with X rows, with all of it; beside the same disks without it. Rows are really stored, read
and computed on; a run in which this machine took more than a fifth of the time is repeated, stretched further, or refused. distances: how
many distances a second a device computes for the host, over threads and sizes of clusters, beside FAISS's kernels on the same bytes in RAM.

  espnx bench device --path /mnt/nvme --json device-topology.json                                 1 to 16 SmartSSDs
  espnx bench device --path /mnt/nvme --show distances --json device-distances.json
  espnx bench device --quick                                                                      does everything work here?

topology takes 1 GiB of disk for each 16,000 tokens of the batch and layer; nothing of it stays. --pairs is of distances."""

SHOWS = ("topology", "distances")


def configure(parser: ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--path", metavar="DIR", default=".", help="a directory on the SSD (default: the current one)")
    add("--show", metavar="S", choices=SHOWS, default="topology", help="topology or distances (default: %(default)s)")
    add("--device", metavar="SPEC", default="smartssd", help="topology: a preset or a spec (default: %(default)s)")
    add("--devices", metavar="N,...", default="1,2,4,8,16", help="topology: how many (default: %(default)s)")
    add("--system", metavar="S,...", help="topology: of all systems these (default: all)")
    add("--batch", type=int, metavar="N", default=8, help="topology: sequences (default: %(default)s)")
    add("--context", type=int, metavar="N", default=1024, help="topology: tokens before (default: %(default)s)")
    add("--layers", type=int, metavar="N", default=2, help="topology: of the model, 16 heads of 128 (default: %(default)s)")
    add("--steps", type=int, metavar="N", default=9, help="topology: tokens that are timed (default: %(default)s)")
    add("--stretch", type=float, metavar="F", default=100.0, help="topology: wall seconds of a virtual one, at least (%(default)s)")


def run(args: Namespace, say: Say) -> list[Row]:
    """Measures. Raises what opening devices, generating and measuring raise."""
    if args.show == "distances":
        from . import distances

        small: dict[str, Any] = {
            "cluster_bytes": (4096, 16384), "threads": (1, 2), "size_bytes": 8 << 20, "n_queries": 2, "clusters_per_query": 64,
        }  # fmt: skip
        return distances.measure(Path(args.path), pairs=args.pairs, seed=args.seed, say=say, **(small if args.quick else {}))
    from .topology import SYSTEMS, Work, measure

    systems = choices(args.system, list(SYSTEMS), "--system") if args.system else list(SYSTEMS)
    if args.quick:
        work = Work(Path(args.path), args.device, batch=4, context=96, steps=3, layers=1, width=256, seed=args.seed, is_checked=False)
        return measure(work, (1, 2), systems, args.stretch, say)
    work = Work(
        Path(args.path),
        args.device,
        batch=args.batch,
        context=args.context,
        steps=args.steps,
        layers=args.layers,
        width=2048,
        seed=args.seed,
    )
    return measure(work, [positive("--devices", word) for word in words(args.devices)], systems, args.stretch, say)


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Of rows of one --show."""
    from . import distances, topology

    of = topology if any(row.params.get("show") == "topology" for row in rows) else distances
    return of.table([row for row in rows if (row.params.get("show") == "topology") == (of is topology)])


def leaves(directory: Path) -> list[Path]:
    """The files of clusters."""
    from .distances import FOLDER_NAME

    return sorted(directory.glob(f"{FOLDER_NAME}-*"))


CASE = Case("device", "near-storage devices: emulated topologies, distances", configure, run, table, leaves=leaves)
