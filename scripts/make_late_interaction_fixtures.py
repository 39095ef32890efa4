"""Makes the fixtures of the tests of late-interaction encoders and imports, with the packages that
they are compared to.

    python scripts/make_late_interaction_fixtures.py colbert
    python scripts/make_late_interaction_fixtures.py pylate
    python scripts/make_late_interaction_fixtures.py fast-plaid
    python scripts/make_late_interaction_fixtures.py pylate-index

with, in this order, colbert-ai 0.2.22 and transformers 4.49 (it does not run with 5); pylate 1.6.0;
fast-plaid 1.7.0 and the torch that it pins; pylate 1.6.0 with fast-plaid 1.4.6 and the torch that
that pins.

Writes under tests/data. Models have two layers and weights made from their names
(tests/encoders/tiny.py), so the folders are kept without them. What names the machine or the time
(paths, host, git state) is taken out of the packages' JSON files.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
NBITS = (1, 2, 4)
PRIVATE = {
    "meta",
    "_name_or_path",
    "root",
    "checkpoint",
    "collection",
    "index_root",
    "index_path",
    "name",
    "rank",
    "nranks",
    "gpus",
}
PRIVATE |= {"queries", "triples"}
INDEX_QUERIES = 4


def load_tiny() -> Any:
    spec = importlib.util.spec_from_file_location(
        "tiny", ROOT / "tests" / "integrations" / "tiny.py"
    )
    if spec is None or spec.loader is None:
        raise FileNotFoundError("tests/encoders/tiny.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tiny = load_tiny()


def fill(model: torch.nn.Module) -> None:
    """Weights by their names in the saved file, whatever the package initialised."""
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            if parameter.is_floating_point():
                parameter.copy_(torch.from_numpy(tiny.weight(name, list(parameter.shape))))


def keep(source: Path, name: str) -> None:
    """Copies a model's folder to the fixtures, with the shapes of its weights in place of the
    weights."""
    from safetensors import safe_open

    target = tiny.DATA / name
    shutil.rmtree(target, ignore_errors=True)
    shapes = {}
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if path.suffix == ".safetensors":
            with safe_open(path, "np") as file:
                shapes[str(relative)] = {
                    key: file.get_slice(key).get_shape()
                    for key in file.keys()  # noqa: SIM118
                }
        elif path.is_file() and path.name != "README.md":
            (target / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target / relative)
    (target / tiny.SHAPES).write_text(json.dumps(shapes))
    scrub(target)


def scrub(folder: Path) -> None:
    for path in [*folder.rglob("*.json"), *folder.rglob("*.metadata")]:
        if path.name == "tokenizer.json":
            path.write_text(json.dumps(json.loads(path.read_text()), separators=(",", ":")) + "\n")
        elif path.name != tiny.SHAPES:
            path.write_text(
                json.dumps(without_private(json.loads(path.read_text())), indent=1) + "\n"
            )


def without_private(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_private(item) for key, item in value.items() if key not in PRIVATE}
    return value


def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(
        {key: tensor.contiguous() for key, tensor in tensors.items()},
        tiny.DATA / f"{name}.safetensors",
    )


def make_colbert(scratch: Path) -> None:
    from colbert.infra import ColBERTConfig
    from colbert.modeling.checkpoint import Checkpoint

    base = tiny.base_bert(scratch / "base")
    settings = {
        "colbert": {"dim": 32, "query_maxlen": 16, "doc_maxlen": 24},
        "colbert-attending": {
            "dim": 32,
            "query_maxlen": 12,
            "doc_maxlen": 40,
            "attend_to_mask_tokens": True,
        },
    }
    for name, options in settings.items():
        config = ColBERTConfig(**options, checkpoint=str(base))
        model = Checkpoint(str(base), colbert_config=config)
        fill(model.model)
        model.save(str(scratch / name))
        keep(scratch / name, name)
        model = Checkpoint(
            str(scratch / name), colbert_config=ColBERTConfig(checkpoint=str(scratch / name))
        )
        vectors = {
            f"document.{i}": model.docFromText([text], keep_dims=False)[0]
            for i, text in enumerate(tiny.DOCUMENTS)
        }
        vectors["queries"] = model.queryFromText(tiny.QUERIES)
        save(name, vectors)
    for nbits in NBITS:
        colbert_index(scratch, scratch / "colbert", nbits)


def colbert_index(scratch: Path, checkpoint: Path, nbits: int) -> None:
    from colbert import Indexer, Searcher
    from colbert.data import Collection
    from colbert.indexing.codecs.residual import ResidualCodec
    from colbert.infra import ColBERTConfig, Run, RunConfig
    from colbert.search.strided_tensor import StridedTensor  # noqa: F401 (its extension is built on import)

    Collection.get_chunksize = lambda self: 20  # several chunks
    name = f"colbert-index-{nbits}"
    texts = tiny.collection(50 if nbits == 2 else 25)
    with Run().context(
        RunConfig(nranks=1, root=str(scratch), experiment="tiny", avoid_fork_if_possible=True)
    ):
        torch.manual_seed(0)
        config = ColBERTConfig(
            nbits=nbits, kmeans_niters=4, index_bsize=8, avoid_fork_if_possible=True
        )
        indexer = Indexer(checkpoint=str(checkpoint), config=config)
        folder = Path(indexer.index(name=name, collection=texts, overwrite=True))
        searcher = Searcher(
            index=name,
            collection=texts,
            config=ColBERTConfig(ncells=64, centroid_score_threshold=0.0, ndocs=4096),
        )
        queries = searcher.encode(tiny.QUERIES[:INDEX_QUERIES])
        found = [searcher.dense_search(queries[i : i + 1], k=10) for i in range(INDEX_QUERIES)]
    codec = ResidualCodec.load(str(folder))
    chunks = [
        ResidualCodec.Embeddings.load(str(folder), i)
        for i in range(len(list(folder.glob("*.codes.pt"))))
    ]
    tokens = torch.cat([codec.decompress(chunk) for chunk in chunks])
    lengths = [
        n
        for i in range(len(chunks))
        for n in json.loads((folder / f"doclens.{i}.json").read_text())
    ]
    keep_index(folder, name, queries, tokens, lengths, found)


def keep_index(
    folder: Path,
    name: str,
    queries: torch.Tensor,
    tokens: torch.Tensor,
    lengths: list[int],
    found: list[Any],
) -> None:
    """The index, the queries, and all scores: MaxSim of the tokens that the package's own
    decompression gives."""
    scores = torch.stack(
        [
            (query @ document.T).max(1).values.sum()
            for query in queries
            for document in tokens.split(lengths)
        ]
    )
    target = tiny.DATA / name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("embeddings.npy", "*.lock"))
    scrub(target)
    tensors = {
        "queries": queries,
        "scores": scores.view(len(queries), -1),
        "tokens": tokens[: sum(lengths[:3])],
    }
    if found:
        tensors |= {
            "pids": torch.tensor([pids for pids, _, _ in found]),
            "found": torch.tensor([values for _, _, values in found]),
        }
    save(name, tensors)


def make_pylate(scratch: Path) -> None:
    from pylate import models

    settings: dict[str, dict[str, Any]] = {
        "pylate": {"query_length": 16, "document_length": 24},
        "pylate-plain": {
            "query_prefix": "",
            "document_prefix": "",
            "do_query_expansion": False,
            "skiplist_words": ["the", "of", "~", "."],
            "query_length": 10,
            "document_length": 20,
        },
        "pylate-attending": {
            "query_length": 14,
            "document_length": 30,
            "attend_to_expansion_tokens": True,
        },
    }
    for name, options in settings.items():
        base = tiny.base_bert(scratch / f"{name}-base")
        model = models.ColBERT(str(base), embedding_size=32, device="cpu", **options)
        if name == "pylate-plain":
            model[1] = models.Dense(
                32, 48, bias=True, activation_function=torch.nn.Tanh(), use_residual=True
            )
            model.append(models.Dense(48, 32, bias=False))
        for module in model:
            fill(module if isinstance(module, models.Dense) else module.auto_model)
        model.save(str(scratch / name))
        keep(scratch / name, name)
        model = models.ColBERT(str(scratch / name), device="cpu")
        documents = model.encode(tiny.DOCUMENTS, is_query=False, batch_size=1)
        queries = model.encode(tiny.QUERIES, is_query=True, batch_size=1)
        vectors = {f"document.{i}": torch.from_numpy(value) for i, value in enumerate(documents)}
        save(
            name,
            vectors | {f"query.{i}": torch.from_numpy(value) for i, value in enumerate(queries)},
        )


def make_fast_plaid(scratch: Path) -> None:
    from fast_plaid import search

    documents = [torch.from_numpy(values) for values in tiny.clouds()]
    index = search.FastPlaid(index=str(scratch / "index"), device="cpu")
    index.create(documents_embeddings=documents, nbits=4, seed=0)
    queries = torch.stack([documents[i][:3] for i in (0, 7, 30)])
    found = index.search(queries, top_k=len(documents), n_ivf_probe=128, n_full_scores=8192)
    keep_found(
        scratch / "index", "fast-plaid-index", queries, [sorted(row) for row in found], documents
    )


def make_pylate_index(scratch: Path) -> None:
    from pylate import indexes

    documents = [torch.from_numpy(values) for values in tiny.clouds()]
    ids = [f"doc-{number:02}" for number in range(len(documents))]
    index = indexes.PLAID(
        index_folder=str(scratch),
        index_name="index",
        nbits=2,
        n_ivf_probe=128,
        device="cpu",
        seed=0,
        use_triton=False,
    )
    index.add_documents(documents_ids=ids, documents_embeddings=documents)
    index.remove_documents([ids[3]])  # renumbers those behind it
    queries = torch.stack([documents[i][:3] for i in (0, 7, 30)])
    left = [document for number, document in enumerate(documents) if number != 3]
    found = [
        sorted((ids.index(hit["id"]), hit["score"]) for hit in row)
        for row in index(queries, k=len(left))
    ]
    keep_found(scratch / "index", "pylate-index", queries, found, left)


def keep_found(
    folder: Path,
    name: str,
    queries: torch.Tensor,
    found: list[list[tuple[int, float]]],
    documents: list[torch.Tensor],
) -> None:
    """The index, the queries, and what the package found: numbers of documents, ascending, and
    scores."""
    target = tiny.DATA / name
    shutil.rmtree(target, ignore_errors=True)
    # What is left out: raw vectors that the package keeps while an index is small, and its lock.
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("embeddings.npy", "*.lock"))
    numbers = torch.tensor([[number for number, _ in row] for row in found])
    scores = torch.tensor([[score for _, score in row] for row in found])
    save(
        name,
        {
            "queries": queries,
            "numbers": numbers,
            "scores": scores,
            "tokens": torch.cat(documents[:3]),
        },
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", choices=("colbert", "pylate", "fast-plaid", "pylate-index"))
    package = parser.parse_args().package
    tiny.DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        make = {
            "colbert": make_colbert,
            "pylate": make_pylate,
            "fast-plaid": make_fast_plaid,
            "pylate-index": make_pylate_index,
        }[package]
        make(Path(scratch))
    return 0


if __name__ == "__main__":
    sys.exit(main())
