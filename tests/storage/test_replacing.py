"""A build that replaces takes the place of a store of its own kind and of nothing else, whoever
builds; killed anywhere, it leaves the store that was there or the new one."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from espnx import errors
from espnx.cli.main import main
from espnx.storage import NativeEngine
from espnx.storage.manifest import NAME, write_manifest
from tests.forks import Forks
from tests.kills import killed, moments
from tests.storage.builders import BUILDERS, SEVERAL, directories
from tests.sweeps import some

STORES = Path("stores")
SAME = {"postings by term": "split postings", "lists": "clusters"}  # of one kind
# of states that are looked at: it is published as split postings are
STEP = {"postings by term": 3}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of every kind."""
    made = tmp_path_factory.mktemp("stores")
    for kind, (make, _) in BUILDERS.items():
        (made / kind).mkdir()
        make(directories(made / kind, kind), 1)
    with NativeEngine() as engine:
        (made / "kept cache" / "a").mkdir(parents=True)
        write_manifest(engine, made / "kept cache" / "a", "espnx-kv-cache", 1, {"layers": 2})
        (made / "kept cache" / "a" / "rows.bin").write_bytes(b"rows")
    for name, text in {
        "foreign manifest": '{"name": "my app"}',
        "not JSON": "manifest",
        "empty manifest": "",
        "a list": "[1]",
        "other kind": '{\n "magic": "espnx-of-tomorrow"}',
    }.items():
        (made / name / "a").mkdir(parents=True)
        (made / name / "a" / NAME).write_text(text)
    (made / "manifest is a folder" / "a" / NAME).mkdir(parents=True)
    (made / "files" / "a").mkdir(parents=True)
    (made / "files" / "a" / "thesis.tex").write_text("years")
    (made / "a file").mkdir()
    (made / "a file" / "a").write_text("years")
    (made / "link to nothing").mkdir()
    (made / "link to nothing" / "a").symlink_to("nothing")
    return made


REFUSED = [
    "kept cache", "foreign manifest", "not JSON", "empty manifest", "a list", "other kind",
    "manifest is a folder", "files", "a file", "link to nothing",
]  # fmt: skip


def targets(kind: str, folder: Path) -> Iterator[list[Path]]:
    """What is there as each of the directories that a builder of that kind takes, the others new
    ones."""
    for place in range(2 if kind in SEVERAL else 1):
        paths = [folder / "new"] * (2 if kind in SEVERAL else 1)
        paths[place] = folder / "a"
        yield paths


@pytest.mark.parametrize("kind", BUILDERS)
def test_anything_else_is_refused_and_stays(kind: str, stores: Path, tmp_path: Path) -> None:
    others = [
        other
        for other in BUILDERS
        if SAME.get(other, other) != SAME.get(kind, kind)
        and {other, kind} != {"graph", "private graphs"}
    ]
    for other, replace in itertools.product([*others, *REFUSED], (True, False)):
        shutil.copytree(stores / other, tmp_path / other, symlinks=True)
        before = contents(tmp_path / other)
        for paths in targets(kind, tmp_path / other):
            with pytest.raises(errors.InvalidInputError) as caught:
                BUILDERS[kind][0](paths, 2, replace=replace)
            assert caught.value.expected or caught.value.fix
            assert contents(tmp_path / other) == before, (kind, other)
            shutil.rmtree(tmp_path / other / "new", ignore_errors=True)
        shutil.rmtree(tmp_path / other)


@pytest.mark.parametrize("kind", BUILDERS)
def test_a_store_of_its_own_kind_is_replaced(kind: str, tmp_path: Path) -> None:
    make, read = BUILDERS[kind]
    paths, fresh = directories(tmp_path, kind), directories(tmp_path / "fresh", kind)
    (tmp_path / "fresh").mkdir()
    make(fresh, 2)
    for path in paths:
        (tmp_path / f"real {path.name}").mkdir()
        path.symlink_to(f"real {path.name}")  # a link to an empty directory is one
    make(paths, 1, replace=True)  # nothing is there to be replaced
    first = read(paths)
    for path in paths:
        (path / "notes.txt").write_text("mine")
        (path / "gen-1").mkdir()
        (path / "gen-1" / "segment-00000.bin").write_text("mine")
    with pytest.raises(errors.InvalidInputError, match=r"already holds .* replace"):
        make(paths, 2)
    assert read(paths) == first
    for _ in range(2):
        make(paths, 2, replace=True)
        assert read(paths) == read(fresh)
    for path, alone in zip(paths, fresh, strict=True):
        assert (
            (path / "notes.txt").read_text()
            == (path / "gen-1" / "segment-00000.bin").read_text()
            == "mine"
        )
        assert len(contents(path)) == len(contents(alone)) + 2, (
            "nothing of the versions before is left"
        )


@pytest.mark.parametrize("kind", [kind for kind in BUILDERS if kind not in SEVERAL])
def test_a_damaged_manifest_of_its_own_kind_is_replaced(kind: str, tmp_path: Path) -> None:
    make, read = BUILDERS[kind]
    path = tmp_path / "a"
    make([path], 1)
    whole = (path / NAME).read_bytes()
    for damaged in (
        whole[:-20],
        whole.replace(b'"version": ', b'"version": 9'),
        whole.replace(b'"checksum": "sha256:', b'"checksum": "sha256:0'),
    ):
        (path / NAME).write_bytes(damaged)
        with pytest.raises(errors.StorageError):
            read([path])
        make([path], 2, replace=True)
        make([tmp_path / "fresh"], 2, replace=True)
        assert read([path]) == read([tmp_path / "fresh"])
        assert len(contents(path)) == len(contents(tmp_path / "fresh"))


def test_parts_are_replaced_all_together_or_not_at_all(tmp_path: Path) -> None:
    make, read = BUILDERS["split postings"]
    a, b, c = (tmp_path / name for name in "abc")
    make([a, b], 1)
    before = contents(tmp_path)
    with pytest.raises(errors.InvalidInputError, match="1 of 2; expected all"):
        make([b, c], 2, replace=True)
    with pytest.raises(errors.InvalidInputError, match="part 0 of 2 of a collection"):
        BUILDERS["postings"][0]([a], 2, replace=True)
    shutil.rmtree(c)
    assert contents(tmp_path) == before
    make([c, b, a], 2, replace=True)  # over more directories, in another order
    assert read([a, b, c]) == read([c, b, a])


@pytest.fixture(scope="module")
def processes(open_forks: Callable[[str], Forks]) -> Forks:
    return open_forks("tests.storage.builders")


# the index has tests of its own
@pytest.mark.parametrize(
    "kind", some([kind for kind in BUILDERS if kind not in ("index", "private graphs")], 2)
)
def test_killed_anywhere_one_of_the_two_is_there(kind: str, folder: Path, processes: Forks) -> None:
    make, read = BUILDERS[kind]
    (folder / "old").mkdir()
    make(directories(folder / "old", kind), 1)
    shutil.copytree(folder / "old", folder / "new")
    states = moments(
        processes, folder / "note", [folder / "new"], kind=kind, path=folder / "new", version=2
    )
    old, new = (read(directories(folder / name, kind)) for name in ("old", "new"))
    assert old != new
    found = []
    # all of the publication, some of what goes before
    for moment in [*states[:-12:9], *states[-12 :: STEP.get(kind, 1)]]:
        path = folder / f"at{moment}"
        shutil.copytree(folder / "old", path)
        if killed(processes, moment, kind=kind, path=path, version=2):
            found.append(read(directories(path, kind)) == new)
            assert found[-1] or read(directories(path, kind)) == old
            if moment in states[-12::6]:
                assert processes.run(kind=kind, path=path, version=2) == 0
                assert read(directories(path, kind)) == new
                assert len(contents(path)) == len(contents(folder / "new"))
        shutil.rmtree(path)
    assert found == sorted(found)
    assert len(found) > 5


def _private_graphs(paths: list[Path], before: object) -> str:
    """Which there are: old, new, or both."""
    try:
        return "old" if BUILDERS["private graphs"][1](paths) == before else "new"
    except errors.InvalidInputError as error:
        said = str(error)
    return (
        "both"
        if "of 2 builds" in said
        and "(replace=True)" in said
        and all(str(path) in said for path in paths)
        else said
    )


def test_private_graphs_of_two_builds_are_told(folder: Path, processes: Forks) -> None:
    """Killed between two of them, where each alone is whole."""
    make, read = BUILDERS["private graphs"]
    paths = directories(folder, "private graphs")
    make(paths, 1)
    before = read(paths)
    shutil.copytree(folder, folder / "new")
    states = moments(
        processes,
        folder / "note",
        [folder / "new"],
        kind="private graphs",
        path=folder / "new",
        version=2,
    )
    seen = []
    for moment in [*states[::8], states[-1]]:
        if killed(processes, moment, kind="private graphs", path=folder, version=2):
            seen.append(_private_graphs(paths, before))
            make(paths, 1, replace=True)
            assert read(paths) == before
    assert set(seen) == {"old", "both", "new"}, seen
    assert seen == sorted(seen, key=["old", "both", "new"].index)


def test_commands(tmp_path: Path, stores: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "a", "text": "who writes to the log?"}\n')
    import numpy as np

    np.save(tmp_path / "x.npy", np.eye(8, 4, dtype=np.float32))
    commands = {
        "postings": ["postings", "build", "{}", "--corpus", str(corpus)],
        "graph": ["graph", "build", str(tmp_path / "x.npy"), "{}", "--threads", "1"],
    }
    for kind, other in itertools.product(commands, ("postings", "graph", "index", "files")):
        path = tmp_path / f"{kind} {other}"
        shutil.copytree(stores / other / "a", path)
        words = [word.format(path) for word in commands[kind]]
        before = contents(path)
        assert main(words) == 2
        assert ("--replace" in capsys.readouterr().err) == (kind == other)
        assert main([*words, "--replace"]) == (0 if kind == other else 2)
        assert (contents(path) == before) == (kind != other)
