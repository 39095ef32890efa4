"""The example package, installed as a user would, in a process that knows nothing of this source tree's tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent / "example_package"
_GENERATES = """
import espnx, torch, transformers

torch.manual_seed(3)
config = transformers.LlamaConfig(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64
)
model, prompt = transformers.LlamaForCausalLM(config).eval(), torch.arange(1, 60)[None]
asked = dict(max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(prompt), pad_token_id=0)
wanted = model.generate(prompt, **asked)
with espnx.KVCache(config, device=espnx.device.open("null", "rows"), spill_interval=4) as cache:
    found = espnx.enable_kv_cache(model).generate(prompt, past_key_values=cache, **asked)
    assert cache.stats()["bytes_written"] > 0
assert found.tolist() == wanted.tolist()
print("the same tokens")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    source = shutil.copytree(PACKAGE, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    target = folder / "site"
    words = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(target), str(source)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, timeout=300)
    return target


def run(installed: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, *words], env=environment, cwd=installed.parent, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_listed_verified_and_used(installed: Path) -> None:
    listed = {each["name"]: each for each in json.loads(run(installed, "-m", "espnx", "device", "ls", "--json", "-"))["devices"]}
    assert listed["null"]["from"] == "espnx-null-device"
    checks = json.loads(run(installed, "-m", "espnx", "device", "verify", "null", "--json", "-"))["checks"]
    outcomes = {each["check"]: each["outcome"] for each in checks}
    assert "failed" not in outcomes.values()
    assert outcomes["rows: attends"] == outcomes["a generation"] == "ok"
    assert run(installed, "-c", _GENERATES) == "the same tokens\n"
