#!/usr/bin/env python3
"""The main jobs on real input: indexes the documentation of the installed Python libraries and
searches it from SSD; then a language model reads what was found, with its KV cache on SSD, and
answers with references: SmolLM2-135M-Instruct where it is installed, else the small model of this
repository, which recalls lines and answers nothing.

    make demo
    .venv/bin/python scripts/demo.py [--documents N] [--directory DIR] [--model DIR]
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

# bars of other libraries, which would mix with what is printed here
os.environ.setdefault("TQDM_DISABLE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import docstrings

import espnx
from espnx.benchmarks.kv.systems import smollm2
from espnx.cli.progress import ProgressLine
from espnx.ops.quantise import load_faiss
from espnx.retrieval.reference import InMemoryReference
from espnx.retrieval.search.result import Hit, StageRank
from espnx.sizes import format_size
from espnx.tables import render_table

#: What the questions are about comes first, so that few documents answer them.
PACKAGES = (
    "numpy",
    "asyncio",
    "csv",
    "tempfile",
    *sorted(name for name in sys.stdlib_module_names if not name.startswith("_")),
)
QUERIES = (
    "read a csv file into rows",
    "solve a system of linear equations",
    "wait for several coroutines at the same time",
    "temporary directory that is removed afterwards",
)
#: About the same passages: the second is asked in a new process.
QUESTIONS = (
    "Which function creates a temporary directory?",
    "How do I create a temporary directory?",
)
#: Inverted lists over vectors, in memory; BM25 from posting lists on SSD.
STAGES = ("ivf", "bm25")
PASSAGES = 8  # found for the first question, that a real model reads
TRAINED = espnx.demo_model()
TEXTS = 30  # found for a query, that a prompt of the small trained model is made of
# Scores may differ by the order of additions; ranks may swap only where two scores are closer than
# this (docs/tolerances.md).
SCORE_TOLERANCE = 1e-3


def device_bytes() -> int:
    """Bytes this process has really fetched from storage, by the kernel's own count."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0


def corpus(count: int) -> list[dict[str, str]]:
    """Docstrings, each behind the name of what it describes: a docstring alone says what a function
    does, and not what it is called, which is what people ask for."""
    found = docstrings.documents(packages=dict.fromkeys(PACKAGES), max_chars=1500)
    return [
        {"id": each["id"], "text": f"{each['id']}\n{each['text']}"}
        for each in itertools.islice(found, count)
    ]


def build(directory: Path, documents: list[dict[str, str]], encoder: object) -> None:
    with ProgressLine() as progress:
        report = espnx.build(
            directory,
            documents,
            encoder,
            first_stages=STAGES,
            pca=128,
            replace=True,
            restart=True,
            progress=progress.update,
        )
    lists = report.first_stage["stages"][0]["nlist"]
    rows = [
        ("documents", f"{report.documents:,}"),
        ("token vectors", f"{report.tokens:,} x 128 fp16"),
        (
            "on SSD",
            (
                f"{format_size(report.record_bytes)} of records, in the order of {lists} inverted "
                "lists"
            ),
        ),
        (
            "in memory",
            f"{report.resident_bytes_per_document:.2f} bytes a document, beside the first stage",
        ),
        (
            "time",
            (
                f"{report.spool_s:.1f} s encoding, {report.arrange_s:.1f} s arranging, "
                f"{report.write_s:.1f} s writing"
            ),
        ),
    ]
    print(render_table(("", ""), rows) + "\n")


def search(index: espnx.Index) -> None:
    for query in QUERIES:
        print(f"{query}\n{index.search(query, k=3)}\n")


def search_hybrid(index: espnx.Index) -> None:
    """Words beside vectors: what each first stage found of the best."""
    for query in QUERIES:
        found = index.search(query, k=3, first_stage=("bm25", "ivf"), fuse="rrf")
        print(query)
        for hit in found:
            said = ", ".join(
                f"{kind}: {f'rank {place.rank}' if place else '-'}"
                for kind, place in stages_of(hit)
            )
            print(f"  {hit.score:8.3f}  {hit.id}  ({said})")


def stages_of(hit: Hit) -> list[tuple[str, StageRank | None]]:
    """What each first stage said of a hit."""
    return [(kind, hit.found_by.get(kind)) for kind in reversed(STAGES)]


def compare(index: espnx.Index, documents: list[dict[str, str]]) -> bool:
    """Ranks of many queries against the in-memory reference; says where the bytes went."""
    texts = [
        document["text"].partition("\n")[2].split(".")[0][:200]
        for document in documents[:: max(1, len(documents) // 50)]
    ]
    vectors = index.encoder.encode_queries(texts)
    index.search(vectors[0])
    before, begun = device_bytes(), time.perf_counter()
    results = [index.search(vector, k=10) for vector in vectors]
    elapsed, fetched = time.perf_counter() - begun, device_bytes() - before
    reference = InMemoryReference(index.store, index.first_stage)
    weight = index.store.manifest.cls_weight
    same = 0
    for vector, result in zip(vectors, results, strict=True):
        ranked = reference.rank(
            vector, candidates=1000, nprobe=index.default_nprobe, cls_weight=weight
        )
        exact = dict(ranked)
        same += all(
            abs(hit.score - score) <= SCORE_TOLERANCE
            and abs(exact[hit.number] - hit.score) <= SCORE_TOLERANCE
            for hit, (_, score) in zip(result.hits, ranked, strict=False)
        )
    hit_rates = [result.hit_rate for result in results if result.prefetch_steps]
    asked, moved = sum(r.bytes_asked for r in results), sum(r.bytes_moved for r in results)
    median_ms = statistics.median(r.timings.total_s for r in results) * 1e3
    rows = [
        (
            "queries",
            (
                f"{len(results)}, {median_ms:.1f} ms median, all of {results[0].candidates} "
                "candidates re-ranked"
            ),
        ),
        ("same ranking as in memory", f"{same} of {len(results)}"),
        (
            "path",
            (
                f"{results[0].effective_path}; page cache bypassed: "
                f"{'no' if 'buffered' in results[0].effective_path else 'yes'}"
            ),
        ),
        ("bytes asked", f"{format_size(asked)}, {format_size(asked / len(results))} a query"),
        ("bytes moved", f"{format_size(moved)} in {sum(r.requests for r in results):,} requests"),
        ("bytes the kernel fetched", f"{format_size(fetched)} in {elapsed:.1f} s"),
        ("prefetch hit rate", f"{statistics.mean(hit_rates):.0%}" if hit_rates else "no prefetch"),
        (
            "critical-path I/O",
            f"{statistics.median(r.timings.critical_io_s for r in results) * 1e3:.1f} ms median",
        ),
    ]
    print(render_table(("", ""), rows))
    return same == len(results)


#: What a part of the demo, or of its setup, waits for.
PARTS = {
    "install": "pip fetches PyTorch, transformers and the weights of two models, once",
    "compile": "every kernel for several instruction sets, once; later what changed in csrc/",
    "index": "the encoder reads every document, on the CPU",
    "search": "every ranking is computed in memory, too, to compare with",
    "model": "weights of 4 bits become fp32, once",
    "answer": "the prompts are read without a kept cache, too, to compare with",
}


class Steps:
    """What is done, one after the other, with the seconds that each took.

    Args:
        before: seconds of parts that were done before, by name; 0 where there was nothing to do.
    """

    def __init__(self, before: Mapping[str, float] | None = None) -> None:
        self.parts = dict(before or {})
        self.taken = list[tuple[str, float]]()

    @contextmanager
    def step(self, title: str, part: str) -> Iterator[None]:
        print(f"\n{len(self.taken) + 1}. {title}\n", flush=True)
        begun = time.perf_counter()
        yield
        self.taken.append((title, time.perf_counter() - begun))
        self.parts[part] = self.parts.get(part, 0) + self.taken[-1][1]
        print(f"\n({self.taken[-1][1]:.1f} s)", flush=True)

    def report(self) -> str:
        lines = [*self.taken, ("in all", sum(seconds for _, seconds in self.taken))]
        table = render_table(
            ("", "s"), [(title, f"{seconds:.1f}") for title, seconds in lines], right=("s",)
        )
        said = [
            f"{part} {seconds:.0f} s" if seconds else f"{part} skipped (done before)"
            for part, seconds in self.parts.items()
        ]
        longest = max(self.parts, key=self.parts.__getitem__)
        return (
            f"{table}\n\nWith what came before: {', '.join(said)}.\nThe longest is {longest}: "
            f"{PARTS[longest]}."
        )


def read_setup(file: Path | None) -> dict[str, float]:
    """Seconds of the parts of scripts/setup.sh, as it left them."""
    if file is None:
        return {}
    found = dict(line.split() for line in file.read_text().splitlines())
    return {part: float(found.get(part, 0)) for part in ("install", "compile")}


def find_model(directory: Path, steps: Steps) -> Path:
    """The folder of SmolLM2, made of its package where that was not done yet; of the small trained
    model where there is no package."""
    if absent := smollm2.missing():
        print(
            f"\nNot installed: {', '.join(absent)}. So the small model of this repository reads, "
            f"instead of {smollm2.NAME}."
        )
        return TRAINED
    folder = directory / f"{smollm2.NAME}-{smollm2.version()}"
    if (folder / "config.json").is_file():
        steps.parts["model"] = 0.0
    else:
        with steps.step(
            f"{smollm2.NAME} ({smollm2.LICENSE}) becomes an ordinary folder, once", "model"
        ):
            smollm2.write_folder(folder)
            print(f"{folder}: weights of 4 bits, dequantised to fp32")
    return folder


def read_aloud(index: espnx.Index, model: Path, storage: Path, steps: Steps) -> bool:
    """What the search found becomes the prompts of a language model."""
    # the small trained model, which recalls lines and answers no questions
    if (model / "held_out.safetensors").is_file():
        with steps.step(
            "A small trained model reads what was found, with its KV cache on SSD", "answer"
        ):
            from demo_generate import generate  # transformers takes seconds to import

            found = [index.search(query, k=TEXTS).hits for query in QUERIES]
            return generate(
                model, ["\n\n".join(hit.text for hit in hits) for hits in found], storage
            )
    storage.mkdir(parents=True, exist_ok=True)
    name = smollm2.NAME if model.name.startswith(smollm2.NAME) else model.name
    with tempfile.TemporaryDirectory(dir=storage) as kept:
        with steps.step(f"{name} answers from what was found, with its KV cache on SSD", "answer"):
            from demo_answer import first_question, second_question

            passages = [hit.text for hit in index.search(QUESTIONS[0], k=PASSAGES).hits]
            is_same, prompt = first_question(model, passages, QUESTIONS, kept)
            if model.name.startswith(smollm2.NAME):
                print(
                    "\nA model of 135 million parameters: what it says is fluent, and not always "
                    "right."
                )
        with steps.step("A new process opens the kept context for another question", "answer"):
            is_same = second_question(model, QUESTIONS[1], prompt, kept) and is_same
    from demo_rag import has_room, referenced_answers

    if not has_room(model):
        return is_same
    with (
        tempfile.TemporaryDirectory(dir=storage) as kept,
        steps.step(
            "It answers with references, from passages that are computed once and then read from "
            "SSD",
            "answer",
        ),
    ):
        return referenced_answers(index, model, QUESTIONS[::-1], kept) and is_same


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--directory", type=Path, default=Path(".cache/demo/index"))
    parser.add_argument(
        "--model",
        type=Path,
        help="a model's folder (default: SmolLM2 where it is installed, else espnx.demo_model())",
    )
    parser.add_argument(
        "--setup",
        type=Path,
        metavar="FILE",
        help="of seconds that scripts/setup.sh took, to be told with the others",
    )
    args = parser.parse_args()
    for folder in [TRAINED] if args.model is None else [args.model]:
        if not (folder / "config.json").is_file():
            train = f"python scripts/train_demo_model.py --out {folder}"
            parser.error(
                f"the language model of the demo: got no config.json in {folder}; train it (an "
                f"hour on two cores): {train}"
            )
    load_faiss()
    steps = Steps(read_setup(args.setup))
    print("espnx demo: the documentation of this Python's libraries, searched from SSD")
    with steps.step("Documentation is encoded and indexed on SSD", "index"):
        documents = corpus(args.documents)
        encoder = espnx.load_encoder("minilm")
        args.directory.parent.mkdir(parents=True, exist_ok=True)
        build(args.directory, documents, encoder)
    with espnx.open(args.directory, encoder) as index:
        with steps.step(
            "It is searched from SSD, and every ranking compared with one from memory", "search"
        ):
            search(index)
            ok = compare(index, documents)
        with steps.step(
            "Words beside vectors: posting lists on SSD find candidates, too, and MaxSim ranks the "
            "union",
            "search",
        ):
            search_hybrid(index)
        model = find_model(args.directory.parent, steps) if args.model is None else args.model
        ok = read_aloud(index, model, args.directory.parent / "kv", steps) and ok
    print(f"\n{steps.report()}")
    print(
        f"\nThe index stays in {args.directory}. Try: .venv/bin/espnx search {args.directory} "
        '"your question"'
    )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
