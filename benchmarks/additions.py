"""``python -m benchmarks.additions STORE``: what many additions of one document cost: CPU, descriptors, bytes written.

The store is built there of random vectors (8 tokens of 32 dimensions, CLS of 128) unless it is there; it grows with every run.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator

import numpy as np
import torch

import espnx


def documents(count: int, first: int) -> Iterator[espnx.Document]:
    """Random vectors; ids from `first` on."""
    rng = np.random.default_rng(first)
    for begin in range(0, count, 1000):
        cls, tokens = rng.normal(size=(1000, 128)).astype(np.float32), rng.normal(size=(1000, 8, 32)).astype(np.float32)
        for i in range(min(1000, count - begin)):
            vectors = espnx.Encoded(torch.from_numpy(cls[i]), torch.from_numpy(tokens[i]))
            yield espnx.Document(first + begin + i, f"text {first + begin + i}", vectors)


def measure(path: str, additions: int) -> dict[str, float]:
    """The figures, by name. Each addition is a call of `espnx.add` of its own, beside an index that is open."""
    new = list(documents(additions, time.time_ns()))
    cpu_s, written_bytes, files = list[float](), list[int](), 0
    with espnx.open(path):
        for document in new:
            begun = time.process_time()
            report = espnx.add(path, [document])
            cpu_s.append(time.process_time() - begun)
            written_bytes.append(report.record_bytes + os.path.getsize(os.path.join(path, "MANIFEST.json")))
            files = max(files, len(os.listdir("/proc/self/fd")))
    with espnx.open(path):
        files_of_index = len(os.listdir("/proc/self/fd"))
    return {
        "additions": additions, "parts": report.parts, "cpu_s": sum(cpu_s), "cpu_s_p50": float(np.percentile(cpu_s, 50)),
        "cpu_s_p99": float(np.percentile(cpu_s, 99)), "written_bytes_p50": float(np.percentile(written_bytes, 50)),
        "written_bytes_p99": float(np.percentile(written_bytes, 99)), "written_bytes_mean": float(np.mean(written_bytes)),
        "open_files_between": files, "open_files_of_process_with_index": files_of_index,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store")
    parser.add_argument("--docs", type=int, default=1_000_000)
    parser.add_argument("--additions", type=int, default=1000)
    args = parser.parse_args()
    if not os.path.exists(os.path.join(args.store, "MANIFEST.json")):
        espnx.build(args.store, documents(args.docs, 0), dims=(128, 32))
    print(json.dumps(measure(args.store, args.additions), indent=1))


if __name__ == "__main__":
    main()
