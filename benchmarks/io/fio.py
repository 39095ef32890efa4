"""fio with io_uring and O_DIRECT: the same file, offsets, sizes, depth and bytes. It checks nothing
and keeps nothing: the bare disk."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

from espnx.errors import EspnxError, MissingDependencyError

from ..harness.runner import Sample
from ..machine import page_cache
from ..machine.counters import read_counters
from .engine import sample_of
from .work import KIB, Point, Work

TIMEOUT_S = 600
# Buffers in huge pages, as espnx's are: a drive takes a request in as many parts as its memory lies
# in, and scattered 4 KiB pages can cost half of its rate. fio's own huge pages have to be reserved
# before; glibc's need not.
ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


@dataclass(frozen=True)
class Variant:
    """A way to run fio. `suffix` tells it from the others of its group; `options` go on its command
    line."""

    suffix: str
    block_bytes: int
    queue_depth: int
    options: tuple[str, ...] = ()


def variants(point: Point) -> list[Variant]:
    """The plain way first, then those that can be faster: the baseline is the best of them, not the
    plainest."""
    plain = Variant("plain", point.block_bytes, point.queue_depth)
    if point.pattern == "sequential" and point.block_bytes >= 256 * KIB:
        shapes = [(256, 32), (512, 16), (960, 8)]
        return [Variant(f"{block}KiB/QD{depth}", block * KIB, depth) for block, depth in shapes]
    if point.pattern == "random" and point.queue_depth >= 32 and point.block_bytes <= 16 * KIB:
        return [
            plain,
            Variant(
                "batched",
                point.block_bytes,
                point.queue_depth,
                ("--iodepth_batch_submit=16", "--iodepth_batch_complete_min=8"),
            ),
        ]
    return [plain]


def require_fio() -> str:
    """The path of fio. Raises MissingDependencyError."""
    found = shutil.which("fio")
    if found is None:
        raise MissingDependencyError(
            "the baseline fio is not installed",
            fix="install the Debian package fio (apt install fio), or leave fio out of --baseline",
        )
    return found


def version() -> str | None:
    """The version that fio says, or None where there is none."""
    found = shutil.which("fio")
    return (
        subprocess.run([found, "--version"], capture_output=True, text=True).stdout.strip()
        if found
        else None
    )


class FioSystem:
    """One variant of fio on the items of a `Work`. Its time is the I/O phase alone, as fio reports
    it, without the start of the program."""

    group = "fio"
    requested_path = effective_path = "uring"

    def __init__(self, work: Work, variant: Variant, cache_state: str = "cold"):
        self.name = f"fio-{variant.suffix}"
        self.work, self.variant, self.cache_state = work, variant, cache_state
        self._program = require_fio()
        self._turn = 0

    def verify(self) -> str | None:
        """fio reports errors and bytes itself; `run` looks at both."""
        return None

    def prepare(self, turn: int) -> str:
        self._turn = turn
        return page_cache.prepare(self.work.data.path, self.cache_state)

    def command(self) -> list[str]:
        """The command line of the next run."""
        work, point = self.work, self.work.point
        place = [f"--size={work.data.size_bytes}", f"--io_size={work.bytes_asked}"]
        if point.pattern == "sequential":
            place = [f"--offset={work.start_bytes(self._turn)}", f"--size={work.bytes_asked}"]
        return [
            self._program,
            "--name=espnx",
            f"--filename={_escaped(str(work.data.path))}",
            "--ioengine=io_uring",
            "--direct=1",
            "--thread",
            f"--rw={'rand' if point.pattern == 'random' else ''}{point.op}",
            f"--bs={self.variant.block_bytes}",
            f"--iodepth={self.variant.queue_depth}",
            f"--randseed={work.seed * 1_000_003 + self._turn + 1}",
            *place,
            *(["--readonly"] if point.op == "read" else ["--overwrite=1", "--fallocate=none"]),
            *self.variant.options,
            "--allow_file_create=0",
            "--output-format=json",
        ]

    def run(self) -> Sample:
        before = read_counters()
        done = subprocess.run(
            self.command(),
            env=os.environ | ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        spent = read_counters() - before  # the kernel adds an ended child's bytes to its parent's
        job = parse(done.stdout) if done.returncode == 0 else None
        if job is None or job["error"]:
            said = (done.stderr or done.stdout).strip()[-400:]
            raise EspnxError(
                "fio failed",
                got=said or f"exit code {done.returncode}",
                fix="run `fio --enghelp=io_uring`; is io_uring allowed here?",
            )
        return self.sample(job, spent.device_bytes(self.work.point.op))

    def sample(self, job: dict[str, Any], device_bytes: int | None) -> Sample:
        """A sample from one job of fio's JSON."""
        side = job[self.work.point.op]
        if side["io_bytes"] != self.work.bytes_asked:
            raise EspnxError(
                "fio did not do the same work",
                got=f"{side['io_bytes']} bytes",
                expected=f"{self.work.bytes_asked} bytes",
            )
        cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
        # Not in bytes_moved: the kernel also counts what loading the program read.
        loaded = {} if device_bytes is None else {"device_bytes": device_bytes}
        more = {
            "requests": side["total_ios"],
            "request_bytes": self.variant.block_bytes,
            "queue_depth": self.variant.queue_depth,
        }
        for name, key in (("latency_us_p50", "50.000000"), ("latency_us_p99", "99.000000")):
            if key in side["clat_ns"].get("percentile", {}):
                more[name] = side["clat_ns"]["percentile"][key] / 1e3
        return sample_of(
            self.work, max(side["runtime"], 1) / 1e3, cpu_s, None, side["io_bytes"], more | loaded
        )

    def close(self) -> None:
        pass


def parse(text: str) -> dict[str, Any] | None:
    """The only job of fio's JSON, which warnings may precede; None where there is none."""
    begin = text.find("{")
    try:
        return dict(json.loads(text[begin:])["jobs"][0]) if begin >= 0 else None
    except (ValueError, KeyError, IndexError):
        return None


def _escaped(path: str) -> str:
    """fio splits file names at colons."""
    return path.replace(":", "\\:")
