"""What every test shares: what this machine has, a folder in memory, poisoned memory for tests of
ops, compiled kernels that are kept, and a count of what was skipped."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from tests.forks import Forks, forks
from tests.reach import SECONDS_KEY
from tests.sweeps import mark_samples

TESTS = Path(__file__).parent
OLD_OBJECTS_EACH = 100  # middle collections; 10 by default
KEPT_S = 30 * 86_400  # what Triton compiled
# OpenMP's threads wait for the next piece of work by spinning, which takes the core from the other
# processes of a parallel run: a third of the time without it. The libraries read this when they are
# loaded; processes that tests start inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@functools.cache
def lacking(marker: str) -> str | None:
    """What this machine lacks for tests with that marker, or None when they can run."""
    if marker == "root":
        return None if os.geteuid() == 0 else "needs root"
    if marker == "gpu":
        import torch

        return None if torch.cuda.is_available() else "needs a CUDA device"
    return None


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    # a machine that cannot install pytest-timeout still runs the tests, without that guard
    if not pluginmanager.hasplugin("timeout"):
        for name in ("timeout", "timeout_method"):
            parser.addini(name, "of pytest-timeout, which is not installed")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What imports and collecting make stays: looking through it for garbage, again and again as it
    grows, finds nothing."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: no garbage collection looks at them again. Nor at what is
    garbage by now, an eighth of all objects, which it takes most of a second to find. Of what comes
    after, old objects are looked at a tenth as often as by default: most are modules that tests
    import late, and a sixth of the time of some tests went to them."""
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, OLD_OBJECTS_EACH)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_samples(items)
    # Long files first, then those of the whole tree: of the last ones, the processes of a parallel
    # run end at about the same time.
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in long, item.path.parent != TESTS))
    for item in items:
        for marker in ("gpu", "root"):
            if item.get_closest_marker(marker) and (reason := lacking(marker)):
                item.add_marker(pytest.mark.skip(reason=f"[{marker}] {reason}"))


class Seconds:
    """What each file of tests took when it last ran here, for `tests.reach` to choose by."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        config, asked = session.config, session.config.option
        in_part = (
            asked.keyword
            or asked.markexpr != "not sweep"
            or any("::" in each for each in config.args)
        )
        if getattr(config, "cache", None) and not in_part and not hasattr(config, "workerinput"):
            config.cache.set(
                SECONDS_KEY,
                config.cache.get(SECONDS_KEY, {})
                | {name: round(took, 2) for name, took in self.seconds.items()},
            )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Seconds())


@pytest.fixture(scope="session")
def open_forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Forks]]:
    """Each module of jobs (see tests/forks.py) is imported once, when the first test asks for
    it."""
    folder = tmp_path_factory.getbasetemp()
    is_one_of_several = "PYTEST_XDIST_WORKER" in os.environ
    with forks(folder.parent if is_one_of_several else folder) as open_module:
        yield functools.cache(open_module)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where a flush costs nothing."""
    from tests.retrieval.common import memory_folder

    with memory_folder() as path:
        yield path


@pytest.fixture
def triton_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are kept between runs, for a month, by the hash that Triton makes of their source,
    constants, options and compilers."""
    folder = request.config.cache.mkdir("triton")
    for kernel in folder.iterdir():
        if kernel.stat().st_mtime < time.time() - KEPT_S:
            shutil.rmtree(kernel, ignore_errors=True)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))


@pytest.fixture(autouse=True, scope="session")
def small_row_files() -> Iterator[None]:
    """Files of rows grow by 1 MiB and not by 64: in a file system in memory, what is reserved is
    zeroed."""
    from espnx.device.rows import extents

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extents, "_GROW_BYTES", 1 << 20)
        yield


@pytest.fixture(autouse=True, scope="session")
def short_graces() -> Iterator[None]:
    """Graphs that are closed wait a tenth of a second for reads that never end, and not a whole
    one."""
    from espnx.graph.search import version

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(version, "_GRACE_S", 0.1)
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Models this small are faster so, the more on a machine that has other work."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """In tests/ops, memory that nobody has written holds NaN (or the type's largest integer), so
    unwritten output cannot pass.

    torch's own switch does it; the extension fills results of its own. ``warn_only``: an op without
    a deterministic implementation still runs.
    """
    if not request.path.is_relative_to(TESTS / "ops"):
        yield
        return
    import torch

    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Counts skipped tests by reason: a suite that passes without hardware should say what it did
    not see."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason.removeprefix("Skipped: ")] += 1
    if not reasons:
        return
    terminalreporter.section("not run on this machine")
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"{count:4d}  {reason}")


def pytest_report_header() -> list[str]:
    """One line about the machine, so that a log says where it comes from."""
    torch_version = "absent"
    if importlib.util.find_spec("torch"):
        from importlib import metadata

        torch_version = metadata.version("torch")
    native = "built" if importlib.util.find_spec("espnx._C") else "not built"
    root = "root" if os.geteuid() == 0 else "not root"
    return [
        (
            f"espnx: {os.cpu_count()} cores, {root}, torch {torch_version}, extension {native}, "
            f"Python {sys.version.split()[0]}"
        )
    ]
