"""``espnx plan``: sizes that what really happens confirms, times only where something was measured,
and wrong usage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from espnx.cli import host
from espnx.cli.commands import plan as cli_plan
from espnx.cli.main import main
from espnx.cli.plans import index as cli_plan_index
from espnx.integrations.streamed import plan as streamed_plan
from espnx.integrations.streamed.load import load_streamed
from espnx.integrations.transformers.cache import KVCache
from espnx.integrations.transformers.enable import enable_kv_cache
from espnx.weights import speed as weights_speed
from tests.cli.documents import strict_json

SHAPE = {"hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4, "vocab_size": 97}
GQA = {**SHAPE, "intermediate_size": 96, "num_key_value_heads": 2}
CONFIGS = {
    "llama": transformers.LlamaConfig(**GQA),
    "mixtral": transformers.MixtralConfig(**GQA, num_local_experts=4, num_experts_per_tok=2),
    "opt": transformers.OPTConfig(
        **SHAPE, ffn_dim=96, word_embed_proj_dim=64, max_position_embeddings=256
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    where = tmp_path_factory.mktemp("models")
    transformers.utils.logging.disable_progress_bar()
    for name, config in CONFIGS.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(
            where / name, max_shard_size="60KB"
        )
    return {name: where / name for name in CONFIGS}


def plan(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    code = main(["plan", *map(str, words), "--json", "-"])
    out = capsys.readouterr()
    assert code == 0, out.err
    return strict_json(out.out)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("extra", [None, 0, 150_000])
def test_the_weights_are_what_load_streamed_takes(
    name: str, extra: int | None, folders: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folders[name]
    free = plan(capsys, "--model", folder, "--context", 1)
    memory = (
        free["weights"]["memory_bytes"]
        if extra is None
        else free["weights"]["least_memory_bytes"] + extra
    )
    weights = plan(capsys, "--model", folder, "--context", 1, "--memory", memory)["weights"]
    model = load_streamed(folder, memory)
    with torch.no_grad():
        model(torch.ones((1, 3), dtype=torch.int64))
    stats = model.espnx_stats()
    model.espnx_weights.close()
    whole = AutoModelForCausalLM.from_pretrained(folder)
    assert weights["total_bytes"] == sum(p.numel() * p.element_size() for p in whole.parameters())
    assert weights["resident_bytes"] + weights["streamed_bytes"] == weights["total_bytes"]
    for key in ("layers_resident", "layers_streamed"):
        assert weights[key] == stats[key]
    assert weights["memory_bytes"] == stats["planned_bytes"] <= memory
    assert weights["read_bytes_per_pass"] == stats["bytes_per_pass"]
    assert (
        weights["buffer_bytes"] >= stats["buffer_bytes"] > weights["buffer_bytes"] * 0.9
        or stats["buffer_bytes"] == 0
    )
    assert (extra is None) == (weights["layers_streamed"] == 0)


@pytest.mark.parametrize(("name", "ratio"), [("llama", 1.0), ("opt", 0.5)])
def test_k_and_v_are_what_the_cache_stores(
    name: str, ratio: float, folders: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch, tokens = 3, 129
    kv = plan(
        capsys, "--model", folders[name], "--batch", batch, "--context", tokens - 1, "--new", 1
    )["kv"]
    model = enable_kv_cache(AutoModelForCausalLM.from_pretrained(folders[name]))
    with KVCache(model.config, tmp_path, x_rows=0) as cache, torch.no_grad():
        model(torch.ones((batch, tokens), dtype=torch.int64), past_key_values=cache)
        stats = cache.stats()
        assert kv["ssd_bytes"] == stats["bytes_written"]
        assert cache.store.memory_bytes <= kv["memory_tail_bytes"] + kv["memory_checksum_bytes"]
    # layers, K and V, KV heads, d, fp32
    rows = batch * 5 * tokens * 2 * (2 if name == "llama" else 4) * 16 * 4
    assert kv["total_bytes"] == rows
    assert kv["bytes_per_token"] * batch * tokens == rows
    assert kv["x_to_kv_ratio"] == ratio
    assert kv["x_bytes_per_token"] == 5 * 64 * 4


def test_a_config_alone_is_enough(folders: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = folders["mixtral"] / "config.json"
    alone = plan(capsys, "--model", file, "--context", 7)
    whole = plan(capsys, "--model", folders["mixtral"], "--context", 7)
    assert alone["model"] | {"sizes_from": "headers"} == whole["model"]
    assert alone["model"]["sizes_from"] == "config"
    assert alone["weights"]["total_bytes"] == whole["weights"]["total_bytes"]
    assert alone["kv"] == whole["kv"]
    half = plan(capsys, "--model", file, "--context", 7, "--dtype", "bfloat16")
    assert 2 * half["weights"]["total_bytes"] == whole["weights"]["total_bytes"]


def test_windows_stay_in_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers.MistralConfig(**GQA, sliding_window=8).save_pretrained(tmp_path)
    kv = plan(capsys, "--model", tmp_path / "config.json", "--batch", 2, "--context", 100)["kv"]
    assert kv["ssd_bytes"] == kv["layers_on_ssd"] == 0
    assert kv["memory_layers_bytes"] == kv["total_bytes"] == 2 * 5 * 7 * 2 * 2 * 16 * 4


def test_rows_beside_a_state_stay_in_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers.FalconH1Config(
        **GQA, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, time_step_limit=(0.0, 1.0)
    ).save_pretrained(tmp_path)
    kv = plan(capsys, "--model", tmp_path / "config.json", "--batch", 2, "--context", 100)["kv"]
    assert kv["layers_on_ssd"] == kv["layers_of_other_kinds"] == 0
    assert (
        kv["memory_layers_bytes"] == kv["total_bytes"] > 2 * 100 * kv["layers_with_rows_and_state"]
    )


def test_without_storage_there_are_no_times(
    folders: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    document = plan(capsys, "--model", folders["llama"], "--context", 100)
    assert document["speeds"] == document["seconds"] == {}
    assert document["bound_by"] is None
    assert main(["plan", "--model", str(folders["llama"]), "--context", "100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-5:]] == [
        "last",
        "disk",
        "memory",
        "compute",
        "resume",
    ]
    assert [line.replace("last step", "last-step").split()[1] for line in lines[-5:]] == ["n/a"] * 5


def test_the_bound_follows_from_what_was_measured(
    folders: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights_speed, "PROBE_BYTES", (5 << 20) + 4096)
    monkeypatch.setattr(weights_speed, "_RUN_S", 0.01)
    words = ("--model", folders["opt"], "--batch", 2, "--context", 200, "--storage", tmp_path)
    smallest = plan(capsys, *words)["weights"]["least_memory_bytes"]
    document = plan(capsys, *words, "--memory", smallest)
    step, speeds, seconds = document["step"], document["speeds"], document["seconds"]
    assert list(tmp_path.iterdir()) == []  # the probe is gone
    assert speeds["probe_bytes"] == (5 << 20) + 4096
    assert (
        step["read_bytes"]
        == document["weights"]["read_bytes_per_pass"] + document["kv"]["ssd_bytes"]
        > 0
    )
    assert seconds["disk"] == pytest.approx(step["read_bytes"] / speeds["storage_bytes_per_s"])
    assert seconds["compute"] == pytest.approx(step["operations"] / speeds["gemm_operations_per_s"])
    assert document["bound_by"] == max(seconds, key=lambda name: seconds[name])
    assert document["kinds"] == {"sizes": "computed", "speeds": "measured", "seconds": "modelled"}
    assert main(["plan", *map(str, words)]) == 0
    assert "bound by" in capsys.readouterr().out


def test_operations_are_two_for_each_weight_and_token(
    folders: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    step = plan(capsys, "--model", folders["mixtral"], "--batch", 3, "--context", 10, "--new", 2)[
        "step"
    ]
    attention, expert = 64 * 64 * 2 + 64 * 32 * 2, 3 * 64 * 96
    per_layer = attention + 2 * expert + 4 * 64 + 2 * 64  # two of four experts, router, norms
    used = 5 * per_layer + 97 * 64 + 64  # head and last norm; the embedding is looked up
    assert step["operations"] == 2 * 3 * used + 2 * 3 * 5 * 4 * 32 * 12


def test_a_prompt_computed_anew_needs_each_weight_for_each_token(
    folders: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    batch, context = 3, 10
    resume = plan(
        capsys, "--model", folders["mixtral"], "--batch", batch, "--context", context, "--new", 2
    )["resume"]
    per_layer = 64 * 64 * 2 + 64 * 32 * 2 + 2 * 3 * 64 * 96 + 4 * 64 + 2 * 64
    # The head once for each sequence; token i attends to i tokens, by 4 heads of 16, in K and in V.
    dense = 2 * batch * (context * (5 * per_layer + 64) + 97 * 64)
    attention = sum(2 * batch * 5 * 4 * 32 * (i + 1) for i in range(context))
    assert resume["operations"] == dense + attention
    assert resume["kv_bytes"] == batch * context * 5 * 2 * 2 * 16 * 4
    assert resume["tokens"] == context


def test_break_even_is_the_bytes_over_the_time_that_is_saved(
    folders: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights_speed, "PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(weights_speed, "_RUN_S", 0.01)
    words = ("--model", folders["llama"], "--context", 300, "--storage", tmp_path)
    document = plan(capsys, *words)
    resume, speeds = document["resume"], document["speeds"]
    assert resume["recompute_s"] == pytest.approx(
        resume["operations"] / speeds["prefill_operations_per_s"]
    )
    assert resume["read_s"] == pytest.approx(resume["kv_bytes"] / speeds["storage_bytes_per_s"])
    assert resume["break_even_bytes_per_s"] == pytest.approx(
        resume["kv_bytes"] / resume["recompute_s"]
    )
    for disk, verdict in ((1e3, "computing is"), (1e15, "reading is")):
        monkeypatch.setattr(
            streamed_plan,
            "read_speed",
            lambda path, disk=disk: weights_speed.ReadSpeed(disk, 1, "posix"),
        )
        assert main(["plan", *map(str, words)]) == 0
        line = next(
            line for line in capsys.readouterr().out.splitlines() if line.startswith("  break-even")
        )
        assert line.endswith(verdict)


def test_windows_cannot_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers.MistralConfig(**GQA, sliding_window=8).save_pretrained(tmp_path)
    assert plan(capsys, "--model", tmp_path, "--context", 100)["resume"] == {}
    assert main(["plan", "--model", str(tmp_path), "--context", "100"]) == 0
    assert "no cache can be kept" in capsys.readouterr().out


@pytest.mark.parametrize("spare", [-1, 0])
def test_it_says_whether_everything_fits_in_memory(
    spare: int, folders: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--model", str(folders["llama"]), "--batch", "2", "--context", "100"]
    known = plan(capsys, *words)
    needed = known["weights"]["total_bytes"] + known["kv"]["total_bytes"]
    monkeypatch.setattr(cli_plan, "usable_memory_bytes", lambda: needed + spare)
    assert plan(capsys, *words)["fit"] == {
        "needed_bytes": needed,
        "usable_bytes": needed + spare,
        "fits": not spare,
    }
    assert main(["plan", *words]) == 0
    assert ("it fits in memory, you need none of this" in capsys.readouterr().out) == (not spare)
    # whoever streams layers has no room for them
    smallest = str(known["weights"]["least_memory_bytes"])
    assert not plan(capsys, *words, "--memory", smallest)["fit"]["fits"]


def test_memory_is_what_is_free_and_what_the_group_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "memory_bytes", lambda: {"available": 500})
    for limit, usable in ((None, 500), ("max", 500), ("300", 300), ("9223372036854771712", 500)):
        monkeypatch.setattr(host, "cgroup_limits", lambda limit=limit: {"memory": limit})
        assert host.usable_memory_bytes() == usable
    monkeypatch.setattr(host, "memory_bytes", dict)
    monkeypatch.setattr(host, "cgroup_limits", lambda: {"memory": None})
    assert host.usable_memory_bytes() is None


def test_an_index(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_speed, "PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(weights_speed, "_RUN_S", 0.01)
    words = [
        "--documents",
        "3000",
        "--tokens",
        "20",
        "--dim",
        "32",
        "--format",
        "int8",
        "--coarse",
        "bit1",
    ]
    sizes = plan(capsys, *words)
    assert (sizes["speeds"], sizes["seconds"]) == ({}, {})
    assert sizes["disk"]["full_records_bytes"] > sizes["disk"]["coarse_records_bytes"] > 3000 * 16
    assert main(["plan", *words]) == 0
    assert "needs --storage DIR" in capsys.readouterr().out
    timed = plan(capsys, *words, "--storage", tmp_path)
    assert timed["disk"] == sizes["disk"]
    assert set(timed["seconds"]) == {"spool", "arrange", "write"}
    monkeypatch.setattr(
        cli_plan_index, "usable_memory_bytes", lambda: sizes["disk"]["total_bytes"] - 1
    )
    assert main(["plan", *words, "--storage", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "it does not fit in memory" in out
    assert "name it with --encoder" in out
    monkeypatch.setattr(cli_plan_index, "usable_memory_bytes", lambda: sizes["disk"]["total_bytes"])
    assert main(["plan", *words]) == 0
    assert "it fits in memory, you need none of this" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "assumed", "lines"),
    [
        ((), ["tokens", "dim"], 2),
        (("--tokens", 20), ["dim"], 1),
        (("--dim", 32), ["tokens"], 1),
        (("--tokens", 20, "--dim", 32), [], 0),
    ],
)
def test_what_is_not_said_of_an_index_is_assumed_and_marked(
    words: tuple[object, ...], assumed: list[str], lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan(capsys, "--documents", 1000, *words)
    assert found["assumed"] == assumed
    said = dict(zip(words[::2], words[1::2], strict=True))
    tokens, dim = said.get("--tokens", 80), said.get("--dim", 128)
    assert (found["inputs"]["tokens"], found["inputs"]["dim"]) == (tokens, dim)
    assert (
        plan(capsys, "--documents", 1000, "--tokens", tokens, "--dim", dim)["disk"] == found["disk"]
    )
    assert main(["plan", "--documents", "1000", *map(str, words)]) == 0
    assert capsys.readouterr().out.count("  assumed") == lines


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (
            (),
            2,
            (
                "nothing to plan; expected one of --model, --documents, --vectors, --postings. "
                "Fix: --model DIR --context S, --documents N"
            ),
        ),
        (("--model", "nope"), 2, "plan --model nope; got no such folder"),
        (("--model", "meta-llama/Llama-3-8B"), 2, "hf download meta-llama/Llama-3-8B"),
        (("--model", "{llama}"), 2, "got no --context"),
        (("--documents", "3", "--storage", "/nodrive/x"), 2, "is the drive mounted?"),
        (("--vectors", "3"), 2, "got no --dim"),
        (
            ("--model", "{llama}", "--context", "1", "--documents", "3"),
            2,
            "got --model and --documents",
        ),
        (
            ("--documents", "3", "--tokens", "2", "--dim", "8", "--encoder", "minilm"),
            2,
            "got --dim and --encoder",
        ),
        (("--documents", "0", "--tokens", "2", "--dim", "8"), 2, "documents"),
        (("--documents", "3", "--tokens", "70000", "--dim", "8"), 2, "at most 65535"),
        (
            ("--documents", "3", "--tokens", "2", "--dim", "8", "--format", "fp17"),
            2,
            "got 'fp17'; did you mean fp16?",
        ),
        (("--model", "/absent", "--context", "1"), 2, "config.json"),
        (("--model", "{llama}", "--context", "0"), 2, "context"),
        (("--model", "{llama}", "--context", "1", "--batch", "0"), 2, "batch"),
        (("--model", "{llama}", "--context", "1", "--memory", "0"), 2, "--memory"),
        (("--model", "{llama}", "--context", "1", "--memory", "1KiB"), 2, "at least"),
        (("--model", "{llama}", "--context", "1", "--memory", "much"), 2, "cannot read a size"),
        (("--model", "{llama}", "--context", "1", "--storage", "/absent"), 1, "cannot write"),
        (("--model", "{llama}"), 2, "--context"),
        (
            ("--model", "{opt}", "--context", "257"),
            2,
            "got 257 tokens and 1 new ones; expected at most the model's 256 positions",
        ),
        (
            ("--model", "{opt}/config.json", "--context", "250", "--new", "8"),
            2,
            "got 250 tokens and 8 new ones",
        ),
    ],
)
def test_wrong_usage(
    words: tuple[str, ...],
    code: int,
    message: str,
    folders: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    filled = [word.format_map(folders) for word in words]
    try:
        got = main(["plan", *filled])
    except SystemExit as error:
        got = int(error.code or 0)
    assert got == code
    assert message in capsys.readouterr().err
