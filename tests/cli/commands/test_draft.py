"""``--draft`` of ``espnx generate`` and ``espnx plan``: the same tokens, what is refused and when,
and memory as planned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from espnx.cli.main import main
from espnx.integrations.generate import model_folder
from espnx.integrations.streamed.drafts import GAMMA, MEASURED, measured_tokens
from espnx.integrations.transformers.cache import KVCache
from espnx.integrations.transformers.enable import enable_kv_cache
from espnx.integrations.transformers.speculation.generate import generate
from espnx.weights.speed import ReadSpeed
from tests.cli.documents import strict_json
from tests.cli.generating import NEW, check, options, results, run, save, write
from tests.integrations.transformers.tiny import make
from tests.retrieval.common import memory_folder

#: Of 64 words and more: rows are stored, and pages named.
TEXTS = [" ".join(f"w{(5 * i + 3 * k) % 90}" for k in range(n)) for i, n in enumerate((90, 70, 64))]


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    with memory_folder() as path:
        yield save(path, make("llama"))


@pytest.mark.parametrize(
    "words",
    [
        ["pages"],
        ["pages", "--draft-memory", "1/4", "--batch", 1],
        ["4bit", "--draft-read-ahead", "1MiB"],
        ["lookup"],
        ["none"],
    ],
)
def test_the_same_tokens(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str], words: list[Any]
) -> None:
    prompts, report = write(folder / "prompts.txt", TEXTS), folder / "report.json"
    more = ["--draft", *words, "--json", report]
    code, out, err = run(capsys, *options(model, folder, prompts), *more)
    assert code == 0, err
    check(results(Path(f"{prompts}.out.jsonl")), ["1", "2", "3"], TEXTS)
    batches = strict_json(report.read_text())["batches"]
    assert ("tokens a pass" in out) is (words != ["none"])
    for batch in batches:
        said = batch["speculation"]
        assert (said is None) is (words == ["none"])
        if said is not None:
            assert said["draft"] == words[0]
            assert said["tokens"] == batch["sequences"] * (NEW - 1)
            assert said["draft_bytes_asked"] == 0
            assert (said["draft_memory_bytes"] > 0) is (words[0] in ("pages", "4bit"))


def test_sampled_results_remember_their_draft(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another draft draws other numbers: a resumed run does not mix them."""
    prompts = write(folder / "prompts.txt", TEXTS[:1])
    words = [*options(model, folder, prompts), "--temperature", 0.8]
    assert run(capsys, *words, "--draft", "pages")[0] == 0
    assert run(capsys, *words, "--draft", "pages")[0] == 0
    code, _, err = run(capsys, *words)
    assert code == 2
    assert "draft" in err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--draft-memory", "1/8"], "--draft none"),
        (["--draft", "lookup", "--draft-memory", "1/8"], "--draft lookup"),
        (["--draft", "4bit", "--draft-memory", "1/8"], "--draft 4bit"),
        (["--draft-read-ahead", "1GiB"], "--draft none"),
        (["--draft", "lookup", "--draft-read-ahead", "1GiB"], "--draft lookup"),
        (["--draft", "pages", "--num-beams", 2], "--num-beams 2"),
        (["--draft", "4bit", "--x-rows", 1], "--x-rows 1"),
        (["--draft", "pages", "--x-rows", 1], "--x-rows 1"),
    ],
)
def test_what_does_not_go_together(
    model: Path,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[Any],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse_to_load(*args: Any) -> Any:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(model_folder, "load_model", refuse_to_load)
    prompts = write(folder / "prompts.txt", TEXTS[:1])
    code, _, err = run(capsys, *options(model, folder, prompts), *words)
    assert code == 2
    assert named in err


@pytest.mark.parametrize("share", ["0", "2", "-1/8", "1/0", "much"])
def test_no_part_of_k_and_v(share: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("generate", "plan"):
        assert main([command, "--draft", "pages", f"--draft-memory={share}"]) == 2
        assert "such as 1/8" in capsys.readouterr().err


def test_streamed_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Drafts by the model would read them for each token: lookup alone."""
    model = save(folder / "model", make("llama", num_hidden_layers=6))
    prompts = write(folder / "prompts.txt", TEXTS[:1])
    code = main(["plan", "--model", str(model), "--context", "64", "--json", "-"])
    least = strict_json(capsys.readouterr().out)["weights"]["least_memory_bytes"]
    assert code == 0
    words = [*options(model, folder, prompts), "--memory", least]
    assert run(capsys, *words, "--out", folder / "plain")[0] == 0
    for kind in ("pages", "4bit"):
        code, _, err = run(capsys, *words, "--draft", kind)
        assert code == 2
        assert "streamed" in err
    code, _, err = run(capsys, *words, "--draft", "lookup")
    assert code == 0, err
    got, plain = (results(path) for path in (Path(f"{prompts}.out.jsonl"), folder / "plain"))
    assert got["1"]["tokens"] == plain["1"]["tokens"]
    planned = ["plan", "--model", str(model), "--context", "64", "--memory", str(least)]
    assert main([*planned, "--draft", "pages"]) == 2
    assert "streamed" in capsys.readouterr().err


@pytest.mark.sampled(1)
@pytest.mark.parametrize("share", [1 / 16, 1 / 4, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_as_planned(
    tmp_path: Path, share: float | None, dtype: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    """To 5 %: what `stats` says drafts took at most."""
    config = transformers.LlamaConfig(
        hidden_size=96,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=97,
        pad_token_id=0,
        eos_token_id=None,
        max_position_embeddings=4096,
    )
    config.save_pretrained(tmp_path)
    batch, context, new = 2, 1800, 24
    kind = "4bit" if share is None else "pages"
    words = ["--batch", batch, "--context", context, "--new", new, "--draft", kind, "--json", "-"]
    words += [] if share is None else ["--draft-memory", share]
    words += ["--dtype", str(dtype).removeprefix("torch.")]
    assert main(["plan", "--model", str(tmp_path / "config.json"), *map(str, words)]) == 0
    document = strict_json(capsys.readouterr().out)
    planned = document["draft"]
    ahead = document["step"]["read_kv_bytes"]
    assert planned["read_ahead_bytes"] == min(planned["memory_bytes"], ahead)
    torch.manual_seed(0)
    model = enable_kv_cache(transformers.LlamaForCausalLM(config).to(dtype).eval())
    ids = torch.randint(1, 97, (batch, context))
    with KVCache(model.config, tmp_path, draft=kind, draft_memory=share) as cache:
        generate(
            model, ids, past_key_values=cache, gamma=GAMMA, max_new_tokens=new, do_sample=False
        )
        taken = cache.stats()["speculation"]["draft_memory_bytes"]
    assert planned["memory_bytes"] == pytest.approx(taken, rel=0.05)
    whole = batch * 2 * 2 * (context + new) * 2 * 64 * dtype.itemsize
    assert (
        planned["memory_bytes"] > (4.7 / (8 * dtype.itemsize) if share is None else share) * whole
    )


def test_seconds_of_drafts(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a disk of 1 MB/s: a pass takes what one by one takes, drafts next to nothing, so that the
    first token more is a gain."""
    slow = ReadSpeed(1e6, 1 << 20, "posix")
    monkeypatch.setattr("espnx.integrations.streamed.plan.read_speed", lambda _: slow)
    words = ["plan", "--model", str(model), "--context", "400", "--storage", str(tmp_path)]
    assert main([*words, "--draft", "pages", "--json", "-"]) == 0
    document = strict_json(capsys.readouterr().out)
    draft = document["draft"]
    assert draft["pass_s"] == document["seconds"]["disk"] > 0.1
    assert 0 < draft["draft_s"] < 0.01 * draft["pass_s"]
    # 1 where drafts take no time of their own, up to the rounding of a sum and a difference
    assert 1 - 1e-12 <= draft["least_tokens_a_pass"] < 1.1
    assert draft["tokens_a_pass"] == MEASURED[1 / 16]
    # the disk reads ahead meanwhile, all the time or as long as there is memory
    drafts_s = GAMMA * draft["draft_s"]
    hidden_s = min(drafts_s, draft["read_ahead_bytes"] / 1e6)
    assert draft["hidden_s"] == pytest.approx(hidden_s, rel=1e-6, abs=1e-12)
    whole = draft["pass_s"] + drafts_s - hidden_s
    assert draft["token_s"] == pytest.approx(whole / MEASURED[1 / 16])
    assert main([*words, "--draft", "lookup"]) == 0
    out = capsys.readouterr().out
    assert "draft lookup" in out
    assert "slower from" in out
    assert "a token  " not in out


def test_tokens_between_what_was_measured() -> None:
    least, most = min(MEASURED), max(MEASURED)
    assert measured_tokens(least) == MEASURED[least]
    assert measured_tokens(most) == MEASURED[most]
    middle = measured_tokens((least * most) ** 0.5)
    assert middle is not None
    assert MEASURED[least] < middle < MEASURED[most]
    assert measured_tokens(least / 2) is None
    assert measured_tokens(1.0) is None
