"""A first stage with two options that another package brings, in two files (package/): built by name and from the command line, searched,
changed, and opened again by a process that knows of it from its installation alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import espnx
from espnx import errors
from espnx.retrieval.build.options import BuildOptions
from espnx.retrieval.first_stage import registry
from tests.forks import Forks
from tests.retrieval.common import build, corpus

PACKAGE = Path(__file__).parent / "package"

_BUILDS = """
import espnx
from tests.retrieval.common import EVERYTHING, corpus, queries

documents = corpus(90)
options = {"dims": 5, "metric": "cosine"}
espnx.build("s", documents[:60], dims=(16, 8), first_stages={"near": options, "ivf": {"nlist": 3}})
espnx.build("alone", documents[:60], dims=(16, 8), first_stages={"near": {}})
for document in documents[60:]:
    espnx.add("s", [document])
espnx.delete("s", [document.id for document in documents[:20]])
espnx.compact("s")
"""
_OPENS = """
import espnx
import numpy as np
from tests.retrieval.common import EVERYTHING, corpus, queries

documents = corpus(90)[20:]
with espnx.open("s") as index:
    stage = index.store.manifest.first_stage.stages[0]
    assert (stage.kind, stage.dims, stage.metric) == ("near", 5, "cosine")
    assert index.store.verify() == len(documents)
    for query in queries(3):
        hits = index.search(query, k=EVERYTHING, candidates=10, rerank=0, first_stage="near")
        found = [hit.id for hit in hits]
        vectors = np.stack([document.vectors.cls.numpy()[:5] for document in documents])
        scores = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)) @ query.cls.numpy()[:5]
        assert found[:10] == [documents[i].id for i in np.argsort(-scores)[:10]], (found, scores)
print("the nearest by five dimensions")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    source, target = folder / "source", folder / "site"
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("__pycache__"))
    assert sorted(each.name for each in source.iterdir()) == ["near_stage.py", "pyproject.toml"]
    words = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(target), str(source)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, timeout=300)
    return target


@pytest.fixture
def run(installed: Path, folder: Path, open_forks: Callable[[str], Forks]) -> Callable[..., str]:
    """Runs a program where the package is installed, in a process of its own, and returns what it printed."""

    def run(program: str, code: int = 0) -> str:
        out, err = folder / "stdout", folder / "stderr"
        text = f"import sys\n\nsys.path.insert(0, {str(installed)!r})\n{program}"
        found = open_forks("tests.doc_examples").run(text=text, cwd=folder, stdout=out, stderr=err)
        assert found == code, err.read_text()
        return out.read_text() + err.read_text()

    return run


def command(*words: str) -> str:
    return f"from espnx.cli.main import main\n\nsys.exit(main({list(words)!r}))\n"


def test_built_changed_and_opened_again(run: Callable[..., str]) -> None:
    run(_BUILDS)
    assert "the nearest by five dimensions" in run(_OPENS)


def test_from_the_command_line(run: Callable[..., str], folder: Path) -> None:
    texts = ["a red house", "a blue boat", "some green grass", "the red car", "a boat at sea"]
    (folder / "c.jsonl").write_text("".join(json.dumps({"id": f"d{i}", "text": text}) + "\n" for i, text in enumerate(texts)))
    asked = ("index", "build", "s", "--corpus", "c.jsonl", "--first-stages", "near,bm25")
    assert "dims (default None), metric (default 'dot')" in run(command(*asked, "--stage-option", "near.dimms=5"), code=2)
    assert "a whole number" in run(command(*asked, "--stage-option", "near.dims=0"), code=2)
    assert "a number" in run(command(*asked, "--stage-option", "near.dims=five"), code=2)
    assert "expected of --first-stages" in run(command(*asked, "--stage-option", "ivf.nlist=5"), code=2)
    run(command(*asked, "--stage-option", "near.dims=100", "--stage-option", "near.metric=cosine", "--stage-option", "bm25.language=none"))
    said = run(command("index", "info", "s"))
    assert all(word in said for word in ("near", "dims 100", "metric cosine")), said
    assert "d1" in run(command("search", "s", "a boat", "--first-stage", "near"))


def test_what_a_build_was_told_is_a_part_of_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named as module:class: an interrupted build goes on where the options are the same."""
    monkeypatch.syspath_prepend(str(PACKAGE))
    monkeypatch.setattr(registry, "_KINDS", dict(registry._KINDS))
    named = "near_stage:NearStage"
    assert list(BuildOptions(first_stages=named).stages) == ["near"]
    from near_stage import NearStage  # type: ignore[import-not-found]

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    documents = corpus(50)
    with monkeypatch.context() as patch:
        patch.setattr(NearStage, "add", stop)
        with pytest.raises(KeyboardInterrupt):
            build(folder / "s", documents, first_stages={named: {"dims": 4}})
    with pytest.warns(UserWarning, match=r"near\.dims=4 instead of 3|near\.dims=3 instead of 4"):
        report = build(folder / "s", documents, first_stages={named: {"dims": 3}})
    assert (report.resumed_documents, report.first_stage["dims"]) == (0, 3)
    with espnx.open(folder / "s") as index:
        assert index.store.manifest.first_stage.describe()["dims"] == 3


def test_what_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PACKAGE))
    monkeypatch.setattr(registry, "_KINDS", dict(registry._KINDS))
    documents, named = corpus(5), "near_stage:NearStage"
    with pytest.raises(errors.MissingDependencyError, match="cannot be loaded"):
        build(folder / "s", documents, first_stages="near_stage:Nobody")
    with pytest.raises(errors.InvalidInputError, match="a name of at most 16 letters"):
        build(folder / "s", documents, first_stages="near_stage:NearSettings")
    with pytest.raises(errors.InvalidInputError, match="expected a mapping"):
        build(folder / "s", documents, first_stages={named: 5})
    with pytest.raises(errors.InvalidInputError, match="each kind once"):
        build(folder / "s", documents, first_stages={named: {}, "near": {}})
    with pytest.raises(errors.InvalidInputError, match="got rows; expected none: it has no options"):
        build(folder / "s", documents, first_stages={"graph": {"rows": 5}})
    with pytest.raises(errors.InvalidInputError, match=r"nlist.*once: it is the option nlist of first stage ivf"):
        build(folder / "s", documents, first_stages={"ivf": {"nlist": 5}}, nlist=5)
    with pytest.raises(errors.InvalidInputError, match="at most 16, those of the vectors"):
        build(folder / "s", documents, first_stages={named: {"dims": 17}})
    assert not (folder / "s" / "MANIFEST.json").exists()
    build(folder / "s", documents, first_stages={named: {"dims": 2}})
    del registry._KINDS["near"]
    with pytest.raises(errors.FormatError, match=r"first_stage\.kind"):  # a store names no module, and none is imported for it
        espnx.open(folder / "s")
