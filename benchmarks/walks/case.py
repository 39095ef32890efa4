"""``espnx bench walks``: hops and distances of FAISS's walks of HNSW graphs, which `espnx simulate`
takes for graphs that are too large to be built here."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence

from espnx.errors import FileMissingError, FormatError, InvalidInputError

from ..harness.arguments import words
from ..harness.registry import Case, Say
from ..harness.result import Row

#: RAGX's, section 5.1, where efSearch grows with the passages.
M, EF_CONSTRUCTION, K = 32, 100, 100
SIZES, EFS = "10000,30000,100000,500000", "375,750,1500,3000"
QUERIES = 100

DESCRIPTION = """A graph is built by FAISS vector after vector (M 32, efConstruction 100, as RAGX
has it), and whenever it has one of --sizes, queries walk it with each efSearch. Distances and hops
are FAISS's counts; what was found is compared with the vectors.

  espnx bench walks --json hnsw-walks.json
  # vectors of your own beside those of the recipe
  espnx bench walks --sizes 10000,30000 --base vectors.npy --queries queries.npy
  # the law that `espnx simulate` computes with, fitted on such a file
  espnx bench walks --law hnsw-walks.json"""


def configure(parser: ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--sizes", metavar="N,...", default=SIZES, help=f"vectors (default: {SIZES})")
    add("--ef", metavar="N,...", default=EFS, help=f"efSearch (default: {EFS})")
    add("--dim", metavar="N", default="128", help="of vectors by the recipe (default: 128)")
    add("--base", metavar="FILE", help="vectors of your own, too: as many of --sizes as it has")
    add("--queries", metavar="FILE", help="for them")
    add("--law", metavar="FILE", help="in place of measuring: the law that fits this result")


def run(args: Namespace, say: Say) -> list[Row]:
    """Raises InvalidInputError."""
    from ..graph.data import Data, by_recipe, from_files

    sizes, efs = (sorted(_numbers(getattr(args, name), f"--{name}")) for name in ("sizes", "ef"))
    if args.quick:
        sizes, efs = [2000], [100]
    if (args.base is None) != (args.queries is None):
        raise InvalidInputError("--base and --queries", got="one of them", expected="both")
    [dim] = _numbers(args.dim, "--dim")
    found: list[tuple[str, Data]] = [("recipe", by_recipe(sizes[-1], QUERIES, K, args.seed, dim))]
    if args.base is not None:
        own = from_files(args.base, args.queries, QUERIES, K)
        found.append((args.base.rsplit("/", 1)[-1], own))
    return [row for name, data in found for row in _walked(name, data, sizes, efs, say)]


def _numbers(text: str, what: str) -> list[int]:
    found = words(text)
    if not found or any(not word.isdigit() or not 1 <= int(word) <= 10**8 for word in found):
        raise InvalidInputError(what, got=repr(text), expected="1 to 100,000,000")
    return [int(word) for word in found]


def _walked(name: str, data, sizes: Sequence[int], efs: Sequence[int], say: Say) -> Iterator[Row]:  # type: ignore[no-untyped-def]
    import numpy as np

    from espnx.ops.quantise import load_faiss

    faiss = load_faiss()
    index = faiss.IndexHNSWFlat(data.base.shape[1], M)
    index.hnsw.efConstruction = EF_CONSTRUCTION
    counts = faiss.cvar.hnsw_stats
    base, queries = (each.astype(np.float32) for each in (data.base, data.queries))
    for n in (size for size in sizes if size <= len(base)):
        say(f"{name}: {n:,} vectors")
        index.add(base[index.ntotal : n])
        exact, _ = faiss.knn(queries, base[:n], K)
        for ef in efs:
            index.hnsw.efSearch = ef
            counts.reset()
            far, ids = index.search(queries, K)
            apart = np.square(base[ids].astype(np.float64) - queries[:, None]).sum(axis=-1)
            limits = exact[:, -1:] * (1 + 1e-5)
            yield Row(
                "walks",
                {
                    "data": name,
                    "n": n,
                    "dim": int(base.shape[1]),
                    "ef": ef,
                    "queries": len(queries),
                },
                "HNSW",
                "measured",
                "memory",
                "memory",
                "warm",
                0,
                None,
                None,
                None,
                0,
                0,
                bool(np.allclose(far, apart, rtol=1e-3)),
                {
                    "distances": counts.ndis / len(queries),
                    "hops": counts.nhops / len(queries),
                    "recall": float((apart <= limits).mean()),
                },
            )


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    headers = ["vectors of", "n", "efSearch", "hops", "distances", "recall@100"]
    return headers, [
        [
            str(row.params["data"]),
            f"{row.params['n']:,}",
            f"{row.params['ef']:,}",
            f"{row.metrics['hops']:,.0f}",
            f"{row.metrics['distances']:,.0f}",
            f"{row.metrics['recall']:.3f}",
        ]
        for row in rows
    ]


def standalone(args: Namespace, say: Say) -> str | None:
    if args.law is None:
        return None
    from .law import fit_law, shown

    try:
        with open(args.law, encoding="utf-8") as file:
            rows = json.load(file)["rows"]
    except FileNotFoundError as error:
        raise FileMissingError("no such result", path=args.law) from error
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise FormatError("no result file", path=args.law, expected="of `espnx bench walks`") from (
            error
        )
    return shown(fit_law(rows))


CASE = Case(
    name="walks",
    summary="hops and distances of HNSW walks, by size and efSearch",
    configure=configure,
    run=run,
    table=table,
    standalone=standalone,
)
