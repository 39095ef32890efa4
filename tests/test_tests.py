"""The tests themselves: a folder for each room, none of them full, and a selection that goes through every room."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
SMOKE = TESTS / "smoke.txt"
#: Folders that mirror no room: data, C++ programs, the scripts' tests, and what goes through several rooms at once.
OTHERS = {"data", "cpp", "scripts", "mutations", "examples"}
FILES_MAX = 16


def rooms() -> set[str]:
    """Folders of Python files below espnx/, by their path; links (benchmarks, kernels) are followed."""
    found = set()
    for name in sorted(path.name for path in (ROOT / "espnx").iterdir() if path.is_dir() and path.name != "__pycache__"):
        top = ROOT / "espnx" / name
        found |= {(Path(name) / path.relative_to(top)).as_posix() for path in (top, *top.rglob("*")) if next(path.glob("*.py"), None)}
    return found


def folders() -> dict[str, int]:
    """Folders of tests, with how many files of tests lie in each."""
    found: dict[str, int] = {}
    for path in TESTS.rglob("test_*.py"):
        folder = path.parent.relative_to(TESTS).as_posix()
        found[folder] = found.get(folder, 0) + 1
    return found


def test_every_folder_mirrors_a_room() -> None:
    strange = {folder for folder in folders() if folder != "." and folder.split("/")[0] not in OTHERS} - rooms()
    assert not strange


def test_no_folder_is_full() -> None:
    assert not {folder: count for folder, count in folders().items() if count > FILES_MAX}


def test_every_room_has_tests_and_a_place_in_the_smoke_selection() -> None:
    """Of rooms inside rooms, those that have a folder of tests."""
    lines = SMOKE.read_text().split()
    tops = {room.split("/")[0] for room in rooms()} - {"kernels"}  # Triton's are tested with the ops that launch them
    assert tops <= {folder.split("/")[0] for folder in folders()}
    inside = {folder for folder in folders() if folder in rooms() and not folder.startswith("benchmarks/")}
    missing = {room for room in tops | inside if not any(line.startswith(f"tests/{room}/") for line in lines)}
    assert not missing, "tests/smoke.txt"
    assert lines == sorted(set(lines))


def test_conftest_says_how_threads_wait_before_torch_reads_it() -> None:
    """What it imports first brings no torch; threads that spin between two pieces of work take twice the suite's time."""
    code = "import sys; import tests.forks; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
