"""The tests themselves: a folder for each room, none of them full, and what is run of long ones."""

from __future__ import annotations

import fnmatch
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sweeps import covering, parameters, some

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
#: Folders that mirror no room: data, C++ programs, the scripts' tests, compiled GPU code, and what
#: goes through several rooms at once.
OTHERS = {"data", "cpp", "scripts", "mutations", "examples", "ptx"}
FILES_MAX = 16


def rooms() -> set[str]:
    """Folders of Python files below espnx/, by their path; links (benchmarks, kernels) are
    followed."""
    found = set()
    for name in sorted(
        path.name
        for path in (ROOT / "espnx").iterdir()
        if path.is_dir() and path.name != "__pycache__"
    ):
        top = ROOT / "espnx" / name
        found |= {
            (Path(name) / path.relative_to(top)).as_posix()
            for path in (top, *top.rglob("*"))
            if next(path.glob("*.py"), None)
        }
    return found


def folders() -> dict[str, int]:
    """Folders of tests, with how many files of tests lie in each."""
    found: dict[str, int] = {}
    for path in TESTS.rglob("test_*.py"):
        folder = path.parent.relative_to(TESTS).as_posix()
        found[folder] = found.get(folder, 0) + 1
    return found


def test_every_folder_mirrors_a_room() -> None:
    strange = {
        folder for folder in folders() if folder != "." and folder.split("/")[0] not in OTHERS
    } - rooms()
    assert not strange


def test_no_folder_is_full() -> None:
    assert not {folder: count for folder, count in folders().items() if count > FILES_MAX}


def test_no_folder_of_tests_is_passed_over(pytestconfig: pytest.Config) -> None:
    patterns = pytestconfig.getini("norecursedirs")
    assert not {
        folder
        for folder in folders()
        if any(fnmatch.fnmatch(part, each) for part in folder.split("/") for each in patterns)
    } - {"."}


def test_every_room_has_tests() -> None:
    # Triton's are tested with the ops that launch them
    tops = {room.split("/")[0] for room in rooms()} - {"kernels"}
    assert tops <= {folder.split("/")[0] for folder in folders()}


def test_samples_show_every_value_or_every_pair() -> None:
    rows = [
        tuple(zip("abc", values, strict=True))
        for values in itertools.product(range(4), range(3), range(2))
    ]
    for together, least in ((1, 4), (2, 12), (3, 24)):
        found = covering(rows, together)
        assert len(found) == least
        assert found <= set(rows)
        for names in itertools.combinations(range(3), together):
            seen = {tuple(row[place] for place in names) for row in found}
            assert seen == {tuple(row[place] for place in names) for row in rows}


def test_some_values_are_swept() -> None:
    params = some([(0, "x"), (1, "y"), (2, "z"), (3, "w")], 3)
    assert [each.values for each in params] == [(0, "x"), (1, "y"), (2, "z"), (3, "w")]
    assert [[mark.name for mark in each.marks] for each in params] == [[], ["sweep"], ["sweep"], []]
    assert [each.values for each in some("ab", 2)] == [("a",), ("b",)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("a", "b"), [(0, "x"), (1, "x"), (2, "x")])
@pytest.mark.parametrize("c", [True, False])
def test_values_that_are_given_together_stay_so(
    a: int, b: str, c: bool, request: pytest.FixtureRequest
) -> None:
    """The six combinations are three samples and three for the sweep."""
    assert parameters(request.node) == ((("a", "b"), (id(a), id(b))), (("c",), (id(c),)))
    chosen = [
        item.name.partition("[")[2]
        for item in request.session.items
        if item.name.startswith(request.function.__name__)
    ]
    if request.config.option.markexpr == "not sweep" and len(chosen) > 1:
        assert len(chosen) == 3
        assert {name[:3] for name in chosen} == {"Tru", "Fal"}


def test_conftest_says_how_threads_wait_before_torch_reads_it() -> None:
    """What it imports first brings no torch; threads that spin between two pieces of work take
    twice the suite's time."""
    code = (
        "import sys; import tests.forks, tests.reach, tests.sweeps; print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
