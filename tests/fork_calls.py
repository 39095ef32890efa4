"""Calls of the public API, each of which a forked child makes after its parent has made any other:
what tests/test_forks.py runs.

They are jobs of tests/forks.py, so that each parent begins with everything imported and no thread:

    what="prepare", folder=F
        writes what the calls open
    what="run", folder=F, first=[A, B], then=[C], step=1, out=O
        makes the first calls, then forks once for each of the others; [] are all of them

A run writes a line of JSON for each outcome: [who, call, how, what it returned]. A child that does
not answer in time is killed and HANGS.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import select
import shutil
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

import faiss  # no child spends its time on importing
import numpy as np
import torch
import transformers.models.bert.modeling_bert
import transformers.models.llama.modeling_llama  # noqa: F401

import espnx
import espnx.forks
import espnx.graph
import espnx.postings
from espnx import errors
from tests.encoders import tiny
from tests.forks import serve

DEADLINE_S = 10.0
HANGS = "hangs"
WORDS = (
    "log disk read write graph token cache list node page query key value head layer row".split()  # noqa: SIM905
)
TEXTS = [
    " ".join(WORDS[(i * (j + 3) + j * j) % 16] for j in range(4 + i % 9)) + f" number {i}"
    for i in range(80)
]
QUERY = "which disk writes the log?"
VECTORS = np.random.default_rng(0).standard_normal((600, 32)).astype(np.float32)
NEW = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
CALLS: dict[str, Callable[[World], Any]] = {}


class World:
    """Where things lie, and what this process has opened and keeps open for a child to inherit."""

    def __init__(self, folder: Path):
        self.folder, self.held, self.asked = folder, dict[str, Any](), 0
        self.opened = ExitStack()

    def path(self, name: str) -> Path:
        return self.folder / name

    def fresh(self, name: str) -> Path:
        """A path that no other process and no earlier call has."""
        where = self.folder / "fresh" / f"{name}-{os.getpid()}-{time.monotonic_ns()}"
        where.parent.mkdir(exist_ok=True)
        return where

    def copied(self, name: str) -> Path:
        return Path(shutil.copytree(self.path(name), self.fresh(name)))

    def keep(self, name: str, make: Callable[[], Any]) -> Any:
        """What is held under a name, or made now."""
        self.asked += 1
        if name not in self.held:
            made = make()
            self.held[name] = (
                self.opened.enter_context(made) if hasattr(made, "__enter__") else made
            )
        return self.held[name]

    def drop(self) -> None:
        """Forgets what is held, without closing it."""
        self.held.clear()
        self.opened.pop_all()
        gc.collect()


def call(function: Callable[[World], Any]) -> Callable[[World], Any]:
    CALLS[function.__name__] = function
    return function


def plain(value: Any) -> Any:
    """As JSON keeps it; numbers to three digits, as other threads add in another order."""
    if isinstance(value, torch.Tensor):
        value = value.detach().float().numpy()
    if isinstance(value, np.ndarray):
        return [plain(each) for each in value.tolist()]
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value


def hits(result: Any) -> Any:
    return [[hit.id, hit.score] for hit in result]


def sums(encoded: list[Any]) -> Any:
    return [float((each.cls.sum() + each.tokens.sum()).item()) for each in encoded[:5]]


# Encoders: held, as an encoder is that a server loads before it forks.


@call
def minilm(world: World) -> Any:
    return sums(world.keep("minilm", lambda: espnx.load_encoder("minilm")).encode_documents(TEXTS))


@call
def bf16(world: World) -> Any:
    return len(
        world.keep("bf16", lambda: espnx.load_encoder("minilm", dtype="bf16")).encode_documents(
            TEXTS[:50]
        )
    )


@call
def colbert(world: World) -> Any:
    return sums(
        world.keep("colbert", lambda: espnx.load_encoder(world.path("colbert"))).encode_documents(
            TEXTS
        )
    )


@call
def huggingface(world: World) -> Any:
    return sums(
        world.keep("huggingface", lambda: espnx.load_encoder(world.path("bert"))).encode_documents(
            TEXTS
        )
    )


@call
def sentence_transformer(world: World) -> Any:
    encoder = world.keep("sentence_transformer", lambda: espnx.load_encoder(world.path("gtr")))
    return espnx.text_vectors(encoder, TEXTS).sum(1)[:5]


@call
def splade(world: World) -> Any:
    encoder = world.keep("splade", lambda: espnx.load_sparse_encoder("splade-tiny"))
    return [sum(each.values()) for each in espnx.term_vectors(encoder, TEXTS[:20])]


@call
def chunk(world: World) -> Any:
    return [
        [each.start_char, each.end_char]
        for each in espnx.chunk(" ".join(TEXTS), tokens=64, overlap=8, tokenizer="minilm")[:5]
    ]


# Indexes.


@call
def build(world: World) -> Any:
    return espnx.build(world.fresh("build"), list(enumerate(TEXTS)), "minilm").documents


@call
def train(world: World) -> Any:
    return espnx.train(
        world.fresh("train"), list(enumerate(TEXTS)), world.path("colbert"), format="residual2"
    ).dim


@call
def search_text(world: World) -> Any:
    index = world.keep("index", lambda: espnx.open(world.path("index")))
    return hits(index.search(QUERY, k=3))


@call
def search_vectors(world: World) -> Any:
    index = world.keep("vector index", lambda: espnx.open(world.path("index"), None))
    return hits(
        index.search(espnx.Encoded(torch.ones(384) / 384**0.5, torch.ones(4, 384) / 20), k=3)
    )


@call
def search_hybrid(world: World) -> Any:
    index = world.keep("hybrid", lambda: espnx.open(world.path("hybrid"), world.path("colbert")))
    found = index.search([QUERY, "page of a list"], k=3, first_stage=("bm25", "ivf"))
    return [hits(found[0]), hits(found[1]), hits(index.search(QUERY, k=3, first_stage="graph"))]


@call
def look(world: World) -> Any:
    index = world.keep("index", lambda: espnx.open(world.path("index")))
    return [len(index), 3 in index, index.get(3), next(iter(index.ids())) in index, index.reload()]


@call
def on_a_device(world: World) -> Any:
    index = world.keep(
        "device index", lambda: espnx.open(world.path("index"), None, device="smartssd")
    )
    return hits(
        index.search(espnx.Encoded(torch.ones(384) / 384**0.5, torch.ones(4, 384) / 20), k=3)
    )


@call
def evaluate(world: World) -> Any:
    index = world.keep("index", lambda: espnx.open(world.path("index")))
    return sorted(index.evaluate({"q": TEXTS[3]}, {"q": {3: 1}}).items())


@call
def change(world: World) -> Any:
    path = world.copied("index")
    added = espnx.add(path, [("new", QUERY)]).documents
    deleted = espnx.delete(path, [1, 2])
    compacted = espnx.compact(path).documents
    with espnx.open(path) as index:
        return [
            added,
            deleted,
            compacted,
            index.search(QUERY, k=1).hits[0].id,
            index.store.verify(),
        ]


@call
def add_first_stage(world: World) -> Any:
    path = world.copied("index")
    espnx.add_first_stage(path, "bm25")
    return espnx.detach(path).path == str(path)


@call
def import_index(world: World) -> Any:
    from espnx.importers.convert import import_index

    return import_index(tiny.DATA / "fast-plaid-index", world.fresh("import")).documents


# Posting lists and graphs.


@call
def build_postings(world: World) -> Any:
    path = world.fresh("postings")
    espnx.Postings.build(path, TEXTS)
    espnx.postings.add(path, [QUERY])
    espnx.postings.delete(path, [0])
    espnx.postings.compact(path)
    with espnx.Postings.open(path) as postings:
        return [postings.search(QUERY, 2).numbers, postings.verify().postings > 0]


@call
def search_postings(world: World) -> Any:
    return (
        world.keep("postings", lambda: espnx.Postings.open(world.path("postings")))
        .search([QUERY] * 4, 3)
        .numbers
    )


@call
def search_split(world: World) -> Any:
    paths = [world.path("split-0"), world.path("split-1")]
    return (
        world.keep("split", lambda: espnx.postings.SplitPostings(paths))
        .search([WORDS[:2]], 3)
        .numbers
    )


@call
def build_graph(world: World) -> Any:
    return espnx.graph.build(VECTORS, world.fresh("graph"), max_degree=16).n


@call
def build_graph_of_codes(world: World) -> Any:
    return espnx.graph.build(
        VECTORS, world.fresh("graph"), max_degree=16, vector_dtype="pq", disk_pq_bytes=8
    ).n


@call
def search_graph(world: World) -> Any:
    graph = world.keep("graph", lambda: espnx.graph.open(world.path("graph")))
    return [graph.search(VECTORS[:5], k=3).ids, graph.verify().pages > 0]


# KV caches and models.


def _model(world: World) -> Any:
    import transformers

    return espnx.enable_kv_cache(
        transformers.AutoModelForCausalLM.from_pretrained(world.path("model"))
    )


def _ids() -> torch.Tensor:
    return torch.randint(3, 97, (3, 150), generator=torch.Generator().manual_seed(1))


@call
def generate(world: World) -> Any:
    model = world.keep("model", lambda: _model(world))
    with espnx.KVCache(model.config, world.fresh("kv")) as cache:
        return model.generate(_ids(), past_key_values=cache, **NEW)[:, -4:]


@call
def go_on(world: World) -> Any:
    """With a cache that is kept open."""
    model = world.keep("model", lambda: _model(world))
    cache = world.keep("cache", lambda: espnx.KVCache(model.config, world.fresh("kv")))
    cache.reset()
    return model.generate(_ids(), past_key_values=cache, **NEW)[:, -4:]


@call
def kept(world: World) -> Any:
    model, path = world.keep("model", lambda: _model(world)), world.fresh("kv")
    found = []
    for _ in range(2):
        with espnx.KVCache(model.config, path, name="kept") as cache:
            found.append(cache.reuse_prefix(_ids()))
            found.append(model.generate(_ids(), past_key_values=cache, **NEW)[:, -4:])
    return found


@call
def on_two_devices(world: World) -> Any:
    model = world.keep("model", lambda: _model(world))
    with espnx.KVCache(
        model.config, [world.fresh("kv"), world.fresh("kv")], device="smartssd", x_rows=0
    ) as cache:
        return model.generate(_ids(), past_key_values=cache, **NEW)[:, -4:]


@call
def streamed(world: World) -> Any:
    model = world.keep("streamed", lambda: espnx.load_streamed(world.path("model"), "5MiB"))
    with torch.no_grad():
        return model(_ids()).logits[0, -1, :4]


@call
def gguf(world: World) -> Any:
    model, _ = espnx.load_gguf(world.path("model.gguf"))
    espnx.enable_kv_cache(model)
    with espnx.KVCache(model.config, world.fresh("kv")) as cache:
        return model.generate(_ids()[:, :40] % 60, past_key_values=cache, **NEW)[:, -4:]


# Below.


@call
def maxsim(world: World) -> Any:
    rows = torch.from_numpy(VECTORS).contiguous()
    at, count = (
        torch.arange(0, 600, 6) * rows.shape[1] * 4,
        torch.full((100,), 6, dtype=torch.int64),
    )
    return espnx.ops.maxsim(rows[:7], rows.view(torch.uint8).flatten(), at, count, format="fp32")[
        :5
    ]


@call
def merge(world: World) -> Any:
    o, lse = torch.from_numpy(np.resize(VECTORS, (2, 4, 600, 64))), torch.zeros(2, 4, 600)
    return espnx.ops.merge(o, lse, o, lse)[0][0, 0, 0, :4]


@call
def distances(world: World) -> Any:
    at = torch.arange(len(VECTORS)) * VECTORS.shape[1] * 4
    return espnx.ops.distances(
        torch.ones(32), torch.from_numpy(VECTORS).view(torch.uint8).flatten(), at, "fp32"
    )[:4]


@call
def crc32c(world: World) -> Any:
    return espnx.ops.crc32c(torch.from_numpy(VECTORS))


@call
def read(world: World) -> Any:
    engine = world.keep("engine", lambda: espnx.open_engine("auto"))
    return int(
        engine.read(espnx.Plan.of(engine.open(world.path("file")), [0, 8192], [4096, 100]))
        .wait()
        .sum()
    )


@call
def read_tables(world: World) -> Any:
    return [
        len(list(espnx.read_corpus(world.path("corpus.parquet")))),
        espnx.read_qrels(world.path("qrels.tsv")),
    ]


def prepare(folder: Path) -> None:
    """Writes what the calls open."""
    import pyarrow as pa
    import pyarrow.parquet as parquet
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.encoders.test_sentence_transformer import save_folder
    from tests.integrations.transformers import gguf_files

    tiny.restore("colbert", folder / "colbert")
    tiny.base_bert(folder / "bert", hidden=64)
    save_folder(folder / "gtr", "bert")
    espnx.build(folder / "index", list(enumerate(TEXTS)), "minilm")
    espnx.build(
        folder / "hybrid",
        list(enumerate(TEXTS)),
        folder / "colbert",
        first_stages=("ivf", "bm25", "graph"),
    )
    espnx.Postings.build(folder / "postings", TEXTS)
    espnx.postings.build_split(
        [folder / "split-0", folder / "split-1"], terms=[text.split() for text in TEXTS]
    )
    espnx.graph.build(VECTORS, folder / "graph", max_degree=16)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    LlamaForCausalLM(
        LlamaConfig(vocab_size=97, pad_token_id=0, eos_token_id=None, **sizes)
    ).save_pretrained(folder / "model")
    gguf_files.write(folder / "model.gguf", gguf_files.tensors())
    (folder / "file").write_bytes(bytes(range(256)) * 64)
    parquet.write_table(
        pa.table({"id": list(map(str, range(len(TEXTS)))), "text": TEXTS}),
        folder / "corpus.parquet",
    )
    (folder / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq1\t0\t1\n")


def outcome(work: Callable[[], Any]) -> Any:
    """What a call returns, or a word for what it raised: ``error`` where it is typed."""
    try:
        return plain(work())
    except errors.EspnxError as error:
        return {"error": type(error).__name__, "says": str(error)}
    except BaseException:
        return {"raised": traceback.format_exc()[-600:]}


def in_child(work: Callable[[], Any]) -> Any:
    """`outcome` of a forked child, or HANGS."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # of forks beside threads, which is the point
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.close(reader)
        faulthandler.dump_traceback_later(DEADLINE_S - 2)  # where it waits
        with os.fdopen(writer, "w") as stream:
            json.dump(outcome(work), stream)
        os._exit(0)
    os.close(writer)
    text, until = b"", time.monotonic() + DEADLINE_S
    with os.fdopen(reader, "rb", buffering=0) as stream:
        while select.select([stream], [], [], max(0.0, until - time.monotonic()))[0]:
            if not (part := stream.read(1 << 16)):
                _, status = os.waitpid(pid, 0)
                return (
                    json.loads(text)
                    if text
                    else {"raised": f"the child died: {os.waitstatus_to_exitcode(status)}"}
                )
            text += part
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return HANGS


@contextmanager
def without(world: World) -> Iterator[None]:
    """A world that has opened nothing; what was open stays so."""
    held, opened = world.held, world.opened
    world.held, world.opened = {}, ExitStack()
    yield
    world.opened.close()
    world.held, world.opened = held, opened


def make_calls(folder: Path, first: list[str], then: list[str], out: TextIO) -> None:
    world = World(folder)

    def say(*words: Any) -> None:
        print(json.dumps(words), file=out, flush=True)

    def own(name: str) -> Any:
        with without(world):
            return CALLS[name](world)

    inherits = set[str]()
    for name in first:
        before = world.asked
        say("parent", name, "", outcome(lambda name=name: CALLS[name](world)))  # type: ignore[misc]
        if world.asked > before:
            inherits.add(name)
    for name in then:
        for how, work in (
            ("inherited", lambda name=name: CALLS[name](world)),
            ("own", lambda name=name: own(name)),
        ):  # type: ignore[misc]
            if how == "own" or name in inherits:
                say("child", name, how, in_child(work))
    if world.held:
        say("child", "close", "inherited", in_child(lambda: world.opened.close()))
        say("child", "drop", "inherited", in_child(world.drop))
        for name in first:
            say("parent", name, "again", outcome(lambda name=name: CALLS[name](world)))  # type: ignore[misc]
        world.opened.close()


def run(job: dict[str, Any]) -> int:
    folder = Path(job["folder"])
    # a program that has just been started, and no child: it computes on all its threads
    espnx.forks._process = os.getpid()
    if job["what"] == "prepare":
        prepare(folder)
        return 0
    with open(job["out"], "w") as out:
        then = (job["then"] or list(CALLS))[:: job["step"]]
        make_calls(folder, job["first"] or list(CALLS), then, out)
    return 0


PACKAGES = (
    "espnx.device",
    "espnx.encoders",
    "espnx.graph",
    "espnx.importers",
    "espnx.integrations.streamed",
    "espnx.integrations.transformers",
    "espnx.kv",
    "espnx.ops",
    "espnx.postings",
    "espnx.retrieval",
    "espnx.storage",
)


def jobs() -> None:
    torch.set_num_threads(2)
    faiss.omp_set_num_threads(2)
    os.environ |= {
        "TQDM_DISABLE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "true",
    }
    serve(run)
