"""What scripts/gpu_check.py runs, one function ``check_NAME(work, rows, failures)`` a check. Needs
a CUDA device.

A check appends rows (schema of `benchmarks.harness.result`) and failures (sentences). Results are
verified before anything is timed, on fresh random data.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from gpu_check_kv import UDEV, check_attention, check_kv  # noqa: F401  # checks, too
from gpu_timing import Rows, row, time_kernels, wall_s

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
TEST_FILE_LIMIT_S = 120
_TIMED_MAXSIM = (
    "MaxSim fp16 d 128, 1 to 359 tokens",
    "MaxSim fp16 d 384, 180 tokens",
    "MaxSim fp32 d 128, 180 tokens",
)
_TIMED_RANGES = ("CRC32C of 4 KiB", "CRC32C of 16 KiB", "gather of records, multiples of 16 bytes")


def check_tests(work: Path, rows: Rows, failures: list[str]) -> None:
    """The tests marked ``gpu``, a process for each file: one that hangs takes only its own time.
    Most of it is compiling, on the CPU."""

    def run_file(path: str) -> None:
        temp = str(work / path.replace("/", "-"))
        # with each test's name before it runs, or nobody knew which one hangs
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "--basetemp", temp, path]
        run_tests(path, command, "gpu-tests", TEST_FILE_LIMIT_S, rows, failures)

    with ThreadPoolExecutor(min(6, os.cpu_count() or 1)) as pool:
        list(pool.map(run_file, gpu_test_files()))


def gpu_test_files() -> list[str]:
    """Test files with tests marked ``gpu``, the kernels' own first: what fails there makes the
    others fail."""
    found = [
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if "mark.gpu" in path.read_text() and path.name != "test_gpu_check.py"
    ]
    return sorted(
        (str(path.relative_to(ROOT)) for path in found),
        key=lambda path: (not path.startswith("tests/ops"), path),
    )


def run_tests(
    name: str, command: Sequence[str], case: str, limit_s: float, rows: Rows, failures: list[str]
) -> None:
    """Runs pytest on one file: a row, and failures by name."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        # bytes, whatever was asked for
        output = b"".join(each or b"" for each in (error.stdout, error.stderr)).decode(
            "utf-8", "replace"
        )
        print(output[-9000:])
        tests = re.findall(r"^\S+::\S+", output, re.MULTILINE)
        at = f", in {tests[-1]}" if tests else ""
        failures.append(f"{name} did not end within {limit_s:g} s{at}")
        rows.append(row(case, {"file": name}, "pytest", [], correct=False))
        return
    print(done.stdout[-9000:], done.stderr[-500:])
    # pytest's last line; a program around it may have added its own
    ends = re.findall(
        r"^.*\d+ (?:passed|failed|errors?|skipped).* in [\d.]+s.*$", done.stdout, re.M
    )
    counts = {
        word: float(number)
        for number, word in re.findall(
            r"(\d+) (passed|failed|errors?|skipped)", ends[-1] if ends else ""
        )
    }
    found = re.findall(r"^(?:FAILED|ERROR) .*$", done.stdout, re.MULTILINE)[:10]
    if done.returncode != 0 and not found:
        found = [f"{name}: ended with status {done.returncode}"]
    if done.returncode == 0 and not counts.get("passed"):
        found = [f"{name}: no test marked gpu ran"]
    failures += found
    rows.append(row(case, {"file": name}, "pytest", [], metrics=counts, correct=not found))


def check_memcheck(work: Path, rows: Rows, failures: list[str]) -> None:
    """The kernels' tests under compute-sanitizer, where it is installed: no access outside a
    buffer."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        rows.append(
            row(
                "gpu-memcheck",
                {"refused": "compute-sanitizer is not installed"},
                "compute-sanitizer",
                [],
            )
        )
        return
    path = "tests/ops/test_cuda.py"
    command = [
        sanitizer,
        "--tool",
        "memcheck",
        "--error-exitcode",
        "9",
        "--target-processes",
        "all",
        sys.executable,
        "-m",
        "pytest",
    ]
    command += [
        "-m",
        "gpu",
        "-q",
        "-k",
        "crc32c or bit_for_bit",
        "--basetemp",
        str(work / "memcheck"),
        path,
    ]
    run_tests(path, command, "gpu-memcheck", 110, rows, failures)


def check_gds(work: Path, rows: Rows, failures: list[str]) -> None:
    """Reads into device memory: bytes and checksums against the CPU engine, then times beside it
    with a copy to the device."""
    from espnx import errors
    from espnx.ops import crc32c_ranges
    from espnx.ops._native import load_ops
    from espnx.storage import NativeEngine, Plan, open_engine

    # or checksums of what is read would be computed on a copy, and the GPU's kernel not be tried
    load_ops()
    path = work / "gds.bin"
    size = 256 * MIB
    data = torch.randint(0, 256, (size + 777,), dtype=torch.uint8)
    path.write_bytes(data.numpy().tobytes())
    generator = torch.Generator().manual_seed(int(time.time()))
    points = {
        "4KiB-random": (
            torch.randperm(size // 4096, generator=generator)[:4096] * 4096,
            torch.full((4096,), 4096),
            0,
        ),
        "records": (
            torch.randint(0, size - 20_000, (1000,), generator=generator),
            torch.randint(0, 20_000, (1000,), generator=generator),
            16384,
        ),
        "sequential": (torch.arange(8) * 32 * MIB, torch.full((8,), 32 * MIB), 0),
        "end": (torch.tensor([size + 777 - 5000, size + 776]), torch.tensor([5000, 1]), 0),
    }
    with NativeEngine("auto") as native:
        plain = native.open(path)
        for name in ("gds", "gds-compat"):
            try:
                with open_engine(name, arena_bytes=512 * MIB) as engine:
                    file = engine.open(path)
                    for point, (offsets, sizes, gap) in points.items():
                        crcs = crc32c_ranges(data, offsets, sizes)
                        plans = (
                            Plan.of(file, offsets, sizes, crc32c=crcs),
                            Plan.of(plain, offsets, sizes),
                        )
                        rows.extend(
                            _read_point(point, engine, file, native, plans, gap, data, failures)
                        )
            except errors.PathUnavailableError as error:
                # An honest refusal is what this path promises on such a machine; the other one must
                # work where cuFile finds udev's database, without which it takes no file.
                rows.append(
                    row(
                        "gds-read",
                        {"refused": str(error)},
                        f"espnx-{name}",
                        [],
                        requested_path=name,
                    )
                )
                if name == "gds-compat" and UDEV.exists():
                    failures.append(str(error))


def _read_point(
    point: str,
    engine: Any,
    file: Any,
    native: Any,
    plans: Any,
    gap: int,
    data: torch.Tensor,
    failures: list[str],
) -> Rows:
    ours, theirs = plans
    future = engine.read(ours, gap_bytes=gap)
    memory, position = future.wait(), future.position_bytes
    host = native.read(theirs, gap_bytes=gap)
    host_memory, host_position = host.wait(), host.position_bytes
    offsets, sizes = ours.offset_bytes.tolist(), ours.size_bytes.tolist()
    on_host = memory.cpu()
    wrong = 0
    for item, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        p, h = int(position[item]), int(host_position[item])
        expected = data[offset : offset + size]
        wrong += size > 0 and not (
            torch.equal(on_host[p : p + size], expected)
            and torch.equal(host_memory[h : h + size], expected)
        )
    if wrong:
        failures.append(
            f"{engine.requested}, {point}: {wrong} of {len(sizes)} items differ from the file"
        )
    params = {"point": point, "items": len(sizes), "bytes": sum(sizes), "crc": False}
    moved = future.bytes_moved
    del memory, host_memory, future, host
    plain_plan = type(ours)(ours.file, ours.offset_bytes, ours.size_bytes)
    direct, through_host = [], []
    for _ in range(0 if wrong else 7):
        direct.append(wall_s(lambda: engine.read(plain_plan, gap_bytes=gap).wait()))
        through_host.append(
            wall_s(
                lambda: (
                    native.read(theirs, gap_bytes=gap)
                    .wait()
                    .pin_memory()
                    .to("cuda", non_blocking=True)
                )
            )
        )
    ratio = (
        {"uring+copy": statistics.median(b / a for a, b in zip(direct, through_host, strict=True))}
        if direct
        else {}
    )
    common = {"bytes_asked": sum(sizes), "bytes_moved": moved, "correct": not wrong}
    made = []
    for system, requested, effective, times, ratios in (
        (f"espnx-{engine.requested}", engine.requested, file.effective, direct, ratio),
        ("uring+copy", native.requested, f"{native.effective}+copy", through_host, {}),
    ):
        metrics = (
            {
                "bytes_per_s": sum(sizes) / statistics.median(times),
                "items_per_s": len(sizes) / statistics.median(times),
            }
            if times
            else {}
        )
        made.append(
            row(
                "gds-read",
                params,
                system,
                times,
                requested_path=requested,
                effective_path=effective,
                metrics=metrics,
                ratio=ratios,
                **common,
            )
        )
    return made


def _records(
    counts: torch.Tensor, d: int, fmt: str, *, spread: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A buffer of records with a header of 16 bytes each and no two alike: (buffer, offset_bytes,
    tokens as float64), on the CPU."""
    from espnx.ops import token_format

    token = token_format(fmt)
    row_bytes = token.token_row_bytes(d)
    sizes = counts * row_bytes
    offsets = torch.cumsum(sizes + 16, 0) - sizes
    buffer = torch.randint(0, 256, (int(offsets[-1] + sizes[-1]),), dtype=torch.uint8)
    tokens = torch.randn(int(counts.sum()), d) * spread
    encoded, begin = token.encode(tokens), 0
    for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True):
        buffer[offset : offset + size] = encoded[begin : begin + size]
        begin += size
    return buffer, offsets, tokens.to(token.dtype).double()


def check_maxsim(work: Path, rows: Rows, failures: list[str]) -> None:
    """The MaxSim kernel against float64 over odd shapes, and its bytes per second beside the
    memory's."""
    from espnx.ops import maxsim

    for fmt in ("fp16", "fp32"):
        for queries, n_query, d in (
            (1, 1, 8),
            (1, 32, 128),
            (3, 5, 72),
            (1, 33, 384),
            (2, 64, 128),
            (1, 7, 1000),
        ):
            counts = torch.tensor([0, 1, 2, 15, 16, 17, 63, 64, 65, 200, 0, 333])
            buffer, offsets, tokens = _records(counts, d, fmt)
            query = torch.randn(queries, n_query, d)
            found = maxsim(query.cuda(), buffer.cuda(), offsets, counts, fmt).cpu().double()
            error = _maxsim_error(query.double(), tokens, counts, found)
            if not error <= 1.0:
                failures.append(
                    f"maxsim {fmt} Q={queries} Lq={n_query} d={d}: {error:.3g} times the error "
                    "that fp32 allows"
                )
    if not failures:
        time_kernels(_TIMED_MAXSIM, rows, failures)


def _maxsim_error(
    query: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor, found: torch.Tensor
) -> float:
    """Largest error over its bound: each product off by 2^-21 (the query in two fp16 parts), each
    of d + Lq additions by 2^-23."""
    worst, begin = 0.0, 0
    n_query, d = query.shape[1:]
    for i, count in enumerate(counts.tolist()):
        rows = tokens[begin : begin + count]
        begin += count
        if count == 0:
            worst = max(worst, 0.0 if bool((found[:, i] == -torch.inf).all()) else float("inf"))
            continue
        exact = (query @ rows.T).amax(-1).sum(-1)
        bound = (query.abs() @ rows.abs().T).amax(-1).sum(-1) * (
            2.0**-21 + (d + n_query) * 2.0**-23
        )
        ratio = ((found[:, i] - exact).abs() / bound).max().item()
        worst = max(worst, ratio if ratio == ratio else float("inf"))
    return worst


def check_crc32c(work: Path, rows: Rows, failures: list[str]) -> None:
    """The CRC32C kernel against the CPU's over odd ranges; its bytes per second, and those of
    `gather`, beside the memory's."""
    from espnx.ops import crc32c_ranges

    buffer = torch.randint(0, 256, (4 * MIB,), dtype=torch.uint8)
    for alignment in (1, 4):
        size = (
            torch.cat([torch.arange(0, 520), torch.randint(0, 70_000, (200,))])
            // alignment
            * alignment
        )
        offset = torch.randint(0, 4 * MIB - 70_000, (size.numel(),)) // alignment * alignment
        for seed in (0, 0xDEADBEEF):
            found = crc32c_ranges(buffer.cuda(), offset, size, seed).cpu()
            wrong = int((found != crc32c_ranges(buffer, offset, size, seed)).sum())
            if wrong:
                failures.append(
                    f"crc32c: {wrong} of {size.numel()} ranges differ (alignment {alignment}, seed "
                    f"{seed:#x})"
                )
    if not failures:
        time_kernels(_TIMED_RANGES, rows, failures)


def check_search(work: Path, rows: Rows, failures: list[str]) -> None:
    """A search end to end: records from storage, scores on the GPU, against the same search on the
    CPU."""
    import espnx
    from espnx.errors import MissingDependencyError, PathUnavailableError
    from espnx.ops.quantise import load_faiss

    try:
        load_faiss()
    except MissingDependencyError as error:
        rows.append(row("search", {"refused": str(error)}, "espnx", []))
        return
    d_cls, dim, n, k = 64, 128, 4000, 20
    generator = torch.Generator().manual_seed(7)
    centres = torch.randn(40, d_cls, generator=generator)

    def vectors(i: int) -> espnx.Encoded:
        cls = centres[i % 40] + 0.3 * torch.randn(d_cls, generator=generator)
        tokens = torch.nn.functional.normalize(
            torch.randn(5 + i % 90, dim, generator=generator), dim=-1
        )
        return espnx.Encoded(cls, tokens)

    documents = [espnx.Document(i, f"document {i}", vectors(i)) for i in range(n)]
    queries = [vectors(i) for i in range(16)]
    espnx.build(work / "index", documents, dims=(d_cls, dim))
    with espnx.open(work / "index") as index:
        expected = index.search(queries, k, candidates=500)
        rows.append(_time_search("espnx-cpu", index, queries, correct=True, requested_path="auto"))
    for path in ("auto", "gds", "gds-compat"):
        try:
            with espnx.open(work / "index", engine=path, compute="cuda") as index:
                found = index.search(queries, k, candidates=500)
                pairs = enumerate(zip(expected, found, strict=True))
                problems = [
                    problem
                    for number, (a, b) in pairs
                    for problem in _ranking_problem(number, a.hits, b.hits)
                ]
                failures += problems
                rows.append(
                    _time_search(
                        "espnx-cuda", index, queries, correct=not problems, requested_path=path
                    )
                )
        except PathUnavailableError as error:
            rows.append(
                row("search", {"refused": str(error)}, "espnx-cuda", [], requested_path=path)
            )
            if path != "gds":
                failures.append(str(error))


def _time_search(
    system: str, index: Any, queries: list[Any], *, correct: bool, requested_path: str
) -> dict[str, Any]:
    """A row for one way to search; without times where its ranking is wrong."""
    results = [index.search(query, 20, candidates=500) for query in queries * 3]
    metrics = {
        name: statistics.median(getattr(r.timings, name) for r in results)
        for name in ("critical_io_s", "maxsim_s")
    }
    return row(
        "search",
        {"documents": index.store.count, "candidates": 500, "k": 20},
        system,
        [result.timings.total_s for result in results] if correct else [],
        requested_path=requested_path,
        effective_path=results[0].effective_path,
        metrics=metrics | {"hit_rate": statistics.mean(r.hit_rate for r in results)},
        correct=correct,
        bytes_asked=sum(r.bytes_asked for r in results) // len(results),
        bytes_moved=sum(r.bytes_moved for r in results) // len(results),
    )


def _ranking_problem(number: int, expected: Any, found: Any) -> list[str]:
    """Empty if the rankings agree. Scores may differ by the order of fp32 sums; then documents that
    close may change places."""
    slack = 1e-4 * max(1.0, max((abs(hit.score) for hit in expected), default=1.0))
    if len(expected) != len(found):
        return [f"query {number}: {len(found)} hits on the GPU, {len(expected)} on the CPU"]
    for place, (a, b) in enumerate(zip(expected, found, strict=True)):
        if abs(a.score - b.score) > slack:
            return [
                (
                    f"query {number}, place {place + 1}: {b.id} with {b.score:.6f} on the GPU, "
                    f"{a.id} with {a.score:.6f} on the CPU"
                )
            ]
    cut = expected[-1].score + slack if expected else 0.0
    missing = {hit.id for hit in expected if hit.score > cut} - {hit.id for hit in found}
    return (
        [f"query {number}: documents {sorted(missing)} are not among the GPU's hits"]
        if missing
        else []
    )
