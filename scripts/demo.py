#!/usr/bin/env python3
"""The main jobs on real input: indexes the documentation of the installed Python libraries and searches it from SSD; then a language model
reads what was found, with its KV cache on SSD.

make demo                          (or: .venv/bin/python scripts/demo.py [--documents N] [--directory DIR] [--model DIR])
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import docstrings

import espnx
from espnx.cli.output import render_table
from espnx.cli.progress import ProgressLine
from espnx.cli.search import render
from espnx.ops.quantise import load_faiss
from espnx.retrieval.reference import InMemoryReference
from espnx.sizes import format_size

QUERIES = (
    "read a csv file into rows",
    "solve a system of linear equations",
    "wait for several coroutines at the same time",
    "temporary directory that is removed afterwards",
)
ROOT = Path(__file__).resolve().parent.parent
TEXTS = 30  # found for a query, that a prompt is made of
# Scores may differ by the order of additions; ranks may swap only where two scores are closer than this (docs/tolerances.md).
SCORE_TOLERANCE = 1e-3


def device_bytes() -> int:
    """Bytes this process has really fetched from storage, by the kernel's own count."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0


def corpus(count: int) -> list[dict[str, str]]:
    packages = ["numpy", *sorted(name for name in sys.stdlib_module_names if not name.startswith("_"))]
    return list(itertools.islice(docstrings.documents(packages=packages, max_chars=1500), count))


def build(directory: Path, documents: list[dict[str, str]], encoder: object) -> None:
    with ProgressLine() as progress:
        report = espnx.build(directory, documents, encoder, pca=128, replace=True, restart=True, progress=progress.update)
    rows = [
        ("documents", f"{report.documents:,}"),
        ("token vectors", f"{report.tokens:,} x 128 fp16"),
        ("on SSD", f"{format_size(report.record_bytes)} of records, in the order of {report.first_stage['nlist']} inverted lists"),
        ("in memory", f"{report.resident_bytes_per_document:.2f} bytes a document, beside the first stage"),
        ("time", f"{report.spool_s:.1f} s encoding, {report.arrange_s:.1f} s arranging, {report.write_s:.1f} s writing"),
    ]
    print(render_table(("", ""), rows) + "\n")


def search(index: espnx.Index) -> None:
    for query in QUERIES:
        print(render(query, index.search(query, k=3)) + "\n")


def compare(index: espnx.Index, documents: list[dict[str, str]]) -> bool:
    """Ranks of many queries against the in-memory reference; says where the bytes went."""
    texts = [document["text"].split(".")[0][:200] for document in documents[:: max(1, len(documents) // 50)]]
    vectors = index.encoder.encode_queries(texts)
    index.search(vectors[0])
    before, begun = device_bytes(), time.perf_counter()
    results = [index.search(vector, k=10) for vector in vectors]
    elapsed, fetched = time.perf_counter() - begun, device_bytes() - before
    reference = InMemoryReference(index.store, index.first_stage)
    weight = index.store.manifest.cls_weight
    same = 0
    for vector, result in zip(vectors, results, strict=True):
        ranked = reference.rank(vector, candidates=1000, nprobe=index.default_nprobe, cls_weight=weight)
        exact = dict(ranked)
        same += all(
            abs(hit.score - score) <= SCORE_TOLERANCE and abs(exact[hit.number] - hit.score) <= SCORE_TOLERANCE
            for hit, (_, score) in zip(result.hits, ranked, strict=False)
        )
    asked, moved = sum(r.bytes_asked for r in results), sum(r.bytes_moved for r in results)
    median_ms = statistics.median(r.timings.total_s for r in results) * 1e3
    rows = [
        ("queries", f"{len(results)}, {median_ms:.1f} ms median, all of {results[0].candidates} candidates re-ranked"),
        ("same ranking as in memory", f"{same} of {len(results)}"),
        ("path", f"{results[0].effective_path}; page cache bypassed: {'no' if 'buffered' in results[0].effective_path else 'yes'}"),
        ("bytes asked", f"{format_size(asked)}, {format_size(asked / len(results))} a query"),
        ("bytes moved", f"{format_size(moved)} in {sum(r.requests for r in results):,} requests"),
        ("bytes the kernel fetched", f"{format_size(fetched)} in {elapsed:.1f} s"),
        ("prefetch hit rate", f"{statistics.mean(r.hit_rate for r in results):.0%}"),
        ("critical-path I/O", f"{statistics.median(r.timings.critical_io_s for r in results) * 1e3:.1f} ms median"),
    ]
    print(render_table(("", ""), rows))
    return same == len(results)


def read_aloud(index: espnx.Index, model: Path, storage: Path) -> bool:
    """What the search found becomes the prompts of a language model."""
    from demo_generate import generate  # transformers takes seconds to import

    print("\nWhat was found is now read by a language model whose KV cache lies on SSD\n")
    found = [index.search(query, k=TEXTS).hits for query in QUERIES]
    return generate(model, ["\n\n".join(hit.text for hit in hits) for hits in found], storage)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=8000)
    parser.add_argument("--directory", type=Path, default=Path(".cache/demo/index"))
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "demo")
    args = parser.parse_args()
    if not (args.model / "config.json").is_file():
        train = f"python scripts/train_demo_model.py --out {args.model}"
        parser.error(f"the language model of the demo: got no config.json in {args.model}; train it (an hour on two cores): {train}")
    load_faiss()
    print("espnx demo: the documentation of this Python's libraries, searched from SSD\n")
    documents = corpus(args.documents)
    encoder = espnx.load_encoder("minilm")
    build(args.directory, documents, encoder)
    with espnx.open(args.directory, encoder) as index:
        search(index)
        ok = compare(index, documents)
        ok = read_aloud(index, args.model, args.directory.parent / "kv") and ok
    print(f'\nThe index stays in {args.directory}. Try: .venv/bin/espnx search {args.directory} "your question"')
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
