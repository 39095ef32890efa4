"""The example package, written by `espnx device skeleton` and installed; the page that shows it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from espnx.cli.main import main
from espnx.device.conformance.row_checks import FAULT_CHECKS
from tests.forks import Forks

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "espnx" / "device" / "example"
_GENERATES = """
import espnx, torch, transformers

torch.manual_seed(3)
config = transformers.LlamaConfig(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64,
)
model, prompt = transformers.LlamaForCausalLM(config).eval(), torch.arange(1, 60)[None]
mask = torch.ones_like(prompt)
asked = dict(max_new_tokens=8, do_sample=False, attention_mask=mask, pad_token_id=0)
wanted = model.generate(prompt, **asked)
with espnx.KVCache(config, device=espnx.device.open("ram", "rows"), spill_interval=4) as cache:
    found = espnx.enable_kv_cache(model).generate(prompt, past_key_values=cache, **asked)
    assert cache.stats()["bytes_written"] > 0
assert found.tolist() == wanted.tolist()
print("the same tokens")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"
    assert main(["device", "skeleton", str(source)]) == 0
    assert {each.name: each.read_text() for each in source.iterdir()} == {
        name: (EXAMPLE / name).read_text() for name in ("pyproject.toml", "ram_device.py")
    }
    target = folder / "site"
    words = [
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--target",
        str(target),
        str(source),
    ]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, timeout=300)
    return target


@pytest.fixture
def run(installed: Path, open_forks: Callable[[str], Forks]) -> Callable[..., str]:
    """Runs a program where the package is installed, in a process of its own that has imported
    espnx, and returns what it printed."""

    def run(program: str, code: int = 0) -> str:
        out, err = installed.parent / "stdout", installed.parent / "stderr"
        text = f"import sys\n\nsys.path.insert(0, {str(installed)!r})\n{program}"
        found = open_forks("tests.doc_examples").run(
            text=text, cwd=installed.parent, stdout=out, stderr=err
        )
        assert found == code, err.read_text()
        return out.read_text()

    return run


def command(*words: str) -> str:
    """The checks' process is forked from the one that has imported everything."""
    forks = (
        "import multiprocessing\n\nimport espnx.device.conformance.verify as verify\n\n"
        "fork = multiprocessing.get_context('fork')\n"
    )
    forks += "verify.get_context = lambda _: fork\n"
    return f"{forks}from espnx.cli.main import main\n\nsys.exit(main({list(words)!r}))\n"


def test_it_is_listed_verified_and_used(run: Callable[..., str]) -> None:
    """Damage cannot be tried on what reads past espnx's engine: that is less than a pass."""
    listed = {
        each["name"]: each
        for each in json.loads(run(command("device", "ls", "--json", "-")))["devices"]
    }
    assert listed["ram"]["from"] == "espnx-ram-device"
    verified = json.loads(
        run(command("device", "verify", "ram", "--soak", "1", "--json", "-"), code=4)
    )
    outcomes = {each["check"]: each["outcome"] for each in verified["checks"]}
    assert "failed" not in outcomes.values()
    assert [name for name, outcome in outcomes.items() if outcome == "not made"] == [
        f"rows: {name}" for name in FAULT_CHECKS
    ]
    assert outcomes["rows: attends"] == outcomes["rows: a soak"] == outcomes["a generation"] == "ok"
    assert outcomes["clusters"] == "not offered"
    assert run(_GENERATES) == "the same tokens\n"


def test_a_directory_that_is_not_empty_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("")
    assert main(["device", "skeleton", str(tmp_path)]) == 2
    assert "a new or empty one" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]


def test_the_page_shows_the_device() -> None:
    assert (
        f"```python\n{(EXAMPLE / 'ram_device.py').read_text()}```\n"
        in (ROOT / "docs" / "device-plugin.md").read_text()
    )
