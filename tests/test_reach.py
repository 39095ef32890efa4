"""What `make check` runs: of a change, the files of tests that can see it, the nearest first."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import reach

GRAPH = {
    "espnx/errors.py": set(),
    "espnx/kv/rows.py": {"espnx/errors.py"},
    "espnx/kv/cache.py": {"espnx/kv/rows.py", "espnx/errors.py"},
    "csrc/io/file.cpp": set(),
    "espnx/storage/native.py": {"espnx/errors.py"},
    "tests/kv/helpers.py": {"espnx/kv/cache.py"},
    "tests/kv/test_rows.py": {"espnx/kv/rows.py"},
    "tests/kv/test_cache.py": {"tests/kv/helpers.py", "espnx/errors.py"},
    "tests/storage/test_native.py": {"espnx/storage/native.py", "espnx/errors.py"},
}


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return reach.edges(reach.files())


def nearest(graph: reach.Edges, *changed: str) -> list[str]:
    near = reach.nearness(graph, changed)
    return sorted(near, key=lambda path: -near[path])


def test_distances_are_counted_in_imports() -> None:
    found = reach.distances(GRAPH, {"espnx/kv/rows.py"})
    assert {path: count for path, count in found.items() if reach.is_test(path)} == {
        "tests/kv/test_rows.py": 1,
        "tests/kv/test_cache.py": 3,
    }


def test_a_test_that_has_changed_comes_first() -> None:
    assert nearest(GRAPH, "tests/kv/test_cache.py") == ["tests/kv/test_cache.py"]
    assert (
        nearest(GRAPH, "espnx/errors.py", "tests/kv/test_cache.py")[0] == "tests/kv/test_cache.py"
    )


def test_few_that_know_a_small_part_come_before_many_that_know_what_all_know() -> None:
    near = reach.nearness(GRAPH, ["espnx/errors.py", "espnx/storage/native.py"])
    assert near == {
        "tests/storage/test_native.py": 1.0,
        "tests/kv/test_cache.py": 1 / 2,
        "tests/kv/test_rows.py": 1 / 3,
    }


def test_a_compiled_file_is_of_the_room_that_calls_it() -> None:
    assert reach.sources("csrc/io/queue/queue.cpp", GRAPH) == {"espnx/storage/native.py"}
    assert nearest(GRAPH, "csrc/io/queue/queue.cpp") == ["tests/storage/test_native.py"]
    assert reach.sources("csrc/bindings/ops.cpp", GRAPH) == {"espnx/storage/native.py"}


def test_what_all_tests_share_reaches_all() -> None:
    assert set(nearest(GRAPH, reach.SHARED)) == {path for path in GRAPH if reach.is_test(path)}


def test_the_time_is_kept_and_folders_take_turns() -> None:
    near = {
        "tests/a/test_1.py": 0.1,
        "tests/a/test_2.py": 0.1,
        "tests/b/test_3.py": 0.1,
        "tests/c/test_4.py": 0.5,
    }
    took = {
        "tests/a/test_1.py": 1.0,
        "tests/a/test_2.py": 2.0,
        "tests/b/test_3.py": 9.0,
        "tests/c/test_4.py": 4.0,
    }
    assert reach.chosen(near, took, 100) == [
        "tests/c/test_4.py",
        "tests/a/test_1.py",
        "tests/b/test_3.py",
        "tests/a/test_2.py",
    ]
    assert reach.chosen(near, took, 7) == [
        "tests/c/test_4.py",
        "tests/a/test_1.py",
        "tests/a/test_2.py",
    ]
    assert reach.chosen(near, {}, 2 * reach.UNKNOWN_SECONDS) == [
        "tests/c/test_4.py",
        "tests/a/test_1.py",
    ]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("espnx/kv/visibility.py", "tests/kv/test_visibility.py"),
        ("espnx/cli/commands/machine/doctor.py", "tests/cli/test_doctor.py"),
        ("tests/retrieval/zygote.py", "tests/retrieval/build/test_crash.py"),
        ("tests/kv/kept/conftest.py", "tests/kv/kept/test_crash.py"),
        ("tests/cpp/graph_stress.cpp", "tests/graph/test_stress.py"),
        ("espnx/device/model/presets/smartssd.yaml", "tests/device/model/test_spec.py"),
        ("scripts/demo.py", "tests/scripts/test_demo.py"),
        ("docs/kv-cache.md", "tests/test_docs.py"),
        ("pyproject.toml", "tests/test_packaging.py"),
        ("csrc/graph/walk.cpp", "tests/graph/test_search.py"),
        ("benchmarks/kv/fleet.py", "tests/benchmarks/kv/test_case.py"),
        ("kernels/maxsim.py", "tests/ops/test_kernels_compile.py"),
    ],
)
def test_of_this_tree(graph: dict[str, set[str]], changed: str, expected: str) -> None:
    assert (reach.ROOT / changed).exists()
    assert expected in nearest(graph, changed)


def test_what_is_always_run_is_there() -> None:
    for node in reach.ALWAYS:
        path, _, name = node.partition("::")
        assert f"def {name}" in (reach.ROOT / path).read_text()


def test_changed_and_new_files_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        subprocess.run(
            ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words],
            check=True,
            capture_output=True,
        )

    monkeypatch.setattr(reach, "ROOT", tmp_path)
    git("init", "-q", "-b", "main")
    for name in ("same.py", "committed.py", "edited.py"):
        (tmp_path / name).write_text("1")
    git("add", ".")
    git("commit", "-qm", "a")
    git("checkout", "-qb", "mine")
    (tmp_path / "committed.py").write_text("2")
    git("commit", "-qam", "b")
    (tmp_path / "edited.py").write_text("2")
    (tmp_path / "new file.py").write_text("2")
    assert reach.changed(None) == ["committed.py", "edited.py", "new file.py"]
    assert reach.changed("HEAD") == ["edited.py", "new file.py"]
