"""What the disk gives at this moment: random reads by fio of the very file that is about to be
searched.

A file of its own, since it runs another program."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

_DEPTH, _SECONDS = 64, 1


def random_reads_per_s(folder: Path) -> float | None:
    """Reads of 4 KiB a second, 64 under way, past the page cache, of the largest file in a folder,
    measured for a second. None: no fio, or it cannot."""
    fio = shutil.which("fio")
    files = [path for path in folder.rglob("*") if path.is_file()]
    if fio is None or not files:
        return None
    largest = max(files, key=lambda path: path.stat().st_size)
    command = [
        fio,
        "--name=now",
        f"--filename={largest}",
        "--readonly",
        "--rw=randread",
        "--bs=4k",
        f"--iodepth={_DEPTH}",
        "--direct=1",
        "--ioengine=io_uring",
        f"--runtime={_SECONDS}",
        "--time_based",
        "--output-format=json",
    ]
    ended = subprocess.run(command, capture_output=True, text=True)
    return (
        float(json.loads(ended.stdout)["jobs"][0]["read"]["iops"])
        if ended.returncode == 0
        else None
    )
