"""``espnx bench ragx``: RAGX's retrievers over private partitions: recall, reads, bytes from flash
and over links."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence

from espnx.errors import InvalidInputError

from ..harness.arguments import choices, positive, words
from ..harness.registry import Case, Say
from ..harness.result import Row

RETRIEVERS = ("bm25", "splade", "doc2vec", "gtr-shape", "colbert-pooled", "colbert", "vectors")
DESCRIPTION = """RAGX's retrievers (section 4.3, table 1) with their passages spread at random over
1, 2, 4 and 8 devices, each of which has its own index of its share; the host merges the best of
all. For each: recall of the retriever's own exact result, and what a query reads and sends, of all
devices together and of the one that does most. Bytes over links are those of devices that compute;
from others, all that is read crosses them.

  bm25, splade      posting lists on SSD, exact; the lists split by passages, and by terms as in
                    RAGX
  doc2vec           trained on the collection, cosine
  gtr-shape         one vector a passage and inner products: GTR's shape, with MiniLM's vector, for
                    want of GTR's weights
  colbert-pooled    RAGX's ColBERT: the mean of a passage's token vectors, squared L2
  colbert           ColBERT as it is: MaxSim over all token vectors of candidates from inverted
                    lists
  vectors           --n vectors of --dim dimensions by recipe

Of single vectors: HNSW as RAGX has it (FAISS's, links in memory, vectors on SSD), the graph of
espnx.graph, and an IVF of sqrt(n) lists of which a thousandth is probed. At equal effort every
device keeps as many candidates as one alone would; at equal recall as few as find what one alone
finds.

  espnx bench ragx --path /mnt/ssd/bench --collection cranfield --json benchmarks/results/ragx.json
  espnx bench ragx --quick                                            does everything work here?

Nothing is timed: counts and bytes are exact, and every query is asked once."""


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
        "--collection",
        metavar="FOLDER",
        help=(
            "texts in BEIR's form: corpus.jsonl, queries.jsonl, qrels.tsv; without it, vectors "
            "alone"
        ),
    )
    add(
        "--retrievers", metavar="R,...", default=",".join(RETRIEVERS), help="(default: %(default)s)"
    )
    add("--partitions", metavar="P,...", default="1,2,4,8", help="devices (default: %(default)s)")
    add("--encoder", default="minilm", metavar="M", help="of token vectors (default: %(default)s)")
    add("--sparse-encoder", default="splade-tiny", metavar="M", help="(default: %(default)s)")
    add("--n", default="40000", metavar="N", help="vectors by recipe (default: %(default)s)")
    add("--dim", default="48", metavar="D", help="of them (default: %(default)s)")
    add("--queries", default="100", metavar="N", help="at most (default: %(default)s)")
    add(
        "--ef",
        default="128",
        metavar="N",
        help="candidates of walks over the vectors at equal effort (default: %(default)s)",
    )
    add(
        "--text-ef",
        default="16",
        metavar="N",
        help="candidates of walks over the collection (default: %(default)s)",
    )
    add(
        "--candidates",
        default="100",
        metavar="N",
        help="that a device scores by MaxSim at equal effort (default: %(default)s)",
    )
    add("-k", default="10", metavar="K", help="passages of each query (default: %(default)s)")
    add(
        "--record",
        metavar="DIR",
        help="write traces of the HNSW's devices into DIR (COLLECTION-RETRIEVER-PARTITIONS.trace)",
    )


def run(args: Namespace, say: Say) -> list[Row]:
    """Measures. Raises what reading, building and searching raise."""
    from ..harness.traces import trace_folder
    from .measure import Settings, measure

    wanted = choices(args.retrievers, RETRIEVERS, "retriever")
    if args.collection is None and not args.quick:
        if args.retrievers != ",".join(RETRIEVERS) and wanted != ["vectors"]:
            raise InvalidInputError(
                "--collection",
                got="none",
                expected="a folder in BEIR's form",
                fix="or --retrievers vectors",
            )
        wanted = ["vectors"]
    counts = [
        positive("--partitions", word)
        for word in (["1", "3"] if args.quick else words(args.partitions))
    ]
    names = ("n", "dim", "queries", "ef", "text_ef", "candidates", "k")
    sizes = {name: positive(f"--{name.replace('_', '-')}", getattr(args, name)) for name in names}
    if args.quick:
        sizes |= {"n": 2000, "dim": 16, "queries": 10, "ef": 32, "candidates": 20}
    settings = Settings(
        path=args.path,
        collection=args.collection,
        retrievers=wanted,
        counts=counts,
        encoder=args.encoder,
        sparse_encoder=args.sparse_encoder,
        seed=args.seed,
        record=trace_folder(args.record),
        **sizes,
    )
    return measure(settings, say)


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """What a query takes of all devices together, and of the one that does most."""
    headers = [
        "retriever", "by", "devices", "at equal", "effort", "recall", "rounds", "reads", "of one",
        "KiB read", "of one", "distances", "of one", "KiB over links", "of one", "right",
    ]  # fmt: skip
    return headers, [_cells(row) for row in rows]


def _cells(row: Row) -> list[str]:
    found = row.metrics
    pairs = [
        _figure(found[name] / scale) if found["distances"] or "distances" not in name else ""
        for each, scale in (
            ("reads", 1),
            ("flash_bytes", 1024),
            ("distances", 1),
            ("link_bytes", 1024),
        )
        for name in (each, f"{each}_most")
    ]
    return [
        row.params["retriever"],
        row.system,
        str(row.params["partitions"]),
        *_effort(row),
        f"{found['recall']:.3f}",
        f"{found['rounds_most']:.1f}",
        *pairs,
        "yes" if row.correct else "NO",
    ]


def _effort(row: Row) -> tuple[str, str]:
    """(at equal what, how much), empty where a retriever is exact."""
    return (row.params["at"], f"{row.metrics['effort']:.0f}") if row.metrics["effort"] else ("", "")


def private(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """What private indexes take beside one index over all, at equal effort and at equal recall."""
    headers = [
        "retriever", "by", "devices", "at equal", "effort", "recall", "distances", "x one index",
        "of one device", "x one index", "rounds of one", "x one index", "KiB read", "x one index",
        "of one device", "x one index", "right",
    ]  # fmt: skip
    singles = {_index(row): row for row in rows if row.params["partitions"] == 1}
    return headers, [
        _beside(row, singles[_index(row)])
        for row in rows
        if row.metrics["effort"] and _index(row) in singles
    ]


def _index(row: Row) -> tuple[object, ...]:
    return row.params["collection"], row.params["retriever"], row.system


def _beside(row: Row, single: Row) -> list[str]:
    cells = [
        row.params["retriever"],
        row.system,
        str(row.params["partitions"]),
        *_effort(row),
        f"{row.metrics['recall']:.3f}",
    ]
    quantities = (
        ("distances", "distances", 1),
        ("distances_most", "distances", 1),
        ("rounds_most", "rounds_most", 1),
        ("flash_bytes", "flash_bytes", 1024),
        ("flash_bytes_most", "flash_bytes", 1024),
    )
    for name, of_one, scale in quantities:
        cells += [
            _figure(row.metrics[name] / scale),
            f"{row.metrics[name] / single.metrics[of_one]:.2f}",
        ]
    return [*cells, "yes" if row.correct else "NO"]


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


CASE = Case(
    "ragx",
    "RAGX's retrievers over private partitions: recall, reads, bytes",
    configure,
    run,
    table,
    views={"private": private},
)
