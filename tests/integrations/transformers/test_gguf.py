"""Models in GGUF files: the weights that the file says, the tokens of the same model made by hand,
and files that are not whole."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from espnx import errors
from espnx.cli.main import main
from espnx.integrations.generate.model_folder import model_fingerprint
from espnx.integrations.streamed.load import load_streamed
from espnx.integrations.transformers import gguf as gguf_models
from espnx.integrations.transformers.cache import KVCache
from espnx.integrations.transformers.enable import enable_kv_cache
from espnx.integrations.transformers.gguf import find_gguf, load_gguf
from tests.integrations.transformers import gguf_files

needs_gguf = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("gguf", "accelerate"))),
    reason="gguf or accelerate is not installed (extra [gguf])",
)
PROMPTS = torch.randint(
    1, gguf_files.VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(1)
)
NEW: dict[str, Any] = {
    "max_new_tokens": 12,
    "do_sample": False,
    "pad_token_id": 0,
    "eos_token_id": None,
}

#: Names in a GGUF file -> names in the framework, for layer {}.
_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def by_hand(path: Path) -> LlamaForCausalLM:
    """The file's tensors, dequantised by gguf itself, in a Llama. llama.cpp keeps the rows of Q and
    K with the halves of each rotation interleaved; the framework has one half after the other."""
    import gguf

    def halves(rows: np.ndarray, heads: int) -> np.ndarray:
        return rows.reshape(heads, gguf_files.D // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)

    state = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        _, layer, kind, *_ = [*tensor.name.split("."), "", ""]
        if kind in ("attn_q", "attn_k"):
            values = halves(values, gguf_files.HEADS if kind == "attn_q" else gguf_files.KV_HEADS)
        outside = {
            "token_embd.weight": "model.embed_tokens.weight",
            "output_norm.weight": "model.norm.weight",
        }
        name = outside.get(tensor.name) or f"model.layers.{layer}.{_NAMES[kind]}.weight"
        state[name] = torch.from_numpy(np.array(values))
    config = LlamaConfig(
        vocab_size=gguf_files.VOCABULARY,
        hidden_size=gguf_files.HIDDEN,
        intermediate_size=gguf_files.WIDE,
        num_hidden_layers=gguf_files.LAYERS,
        num_attention_heads=gguf_files.HEADS,
        num_key_value_heads=gguf_files.KV_HEADS,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config)
    report = model.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    assert not report.missing_keys
    return model.eval()


@needs_gguf
@pytest.mark.parametrize("quantised", [None, "Q8_0", "Q4_1"])
def test_the_same_dequantised_model(tmp_path: Path, quantised: str | None) -> None:
    file = gguf_files.write(tmp_path / "tiny.gguf", gguf_files.tensors(), quantised=quantised)
    expected = by_hand(file)
    model, tokenizer = load_gguf(tmp_path)
    assert not model.training
    mine = dict(model.named_parameters())
    assert all(torch.equal(mine[name], values) for name, values in expected.named_parameters())
    assert len(mine) == len(dict(expected.named_parameters()))
    assert tokenizer.decode(tokenizer("hello").input_ids) == "hello"
    reference = expected.generate(
        PROMPTS, past_key_values=DynamicCache(config=expected.config), **NEW
    )
    enable_kv_cache(model)
    with KVCache(model.config, tmp_path / "kv", name="kept") as cache:
        assert torch.equal(model.generate(PROMPTS, past_key_values=cache, **NEW), reference)
    # its fingerprint is that of an ordinary model
    with KVCache(model.config, tmp_path / "kv", name="kept") as cache:
        assert cache.reuse_prefix(PROMPTS) == PROMPTS.shape[1] - 1
        assert torch.equal(model.generate(PROMPTS, past_key_values=cache, **NEW), reference)


@needs_gguf
def test_it_is_saved_and_streamed_as_any_other(tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "tiny.gguf", gguf_files.tensors(), quantised="Q8_0")
    model, tokenizer = load_gguf(file, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    model.save_pretrained(tmp_path / "folder")
    tokenizer.save_pretrained(tmp_path / "folder")
    assert "quantization_config" not in json.loads(
        (tmp_path / "folder" / "config.json").read_text()
    )
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype="auto")
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True)
    )
    streamed = load_streamed(tmp_path / "folder", memory="320KiB")
    with torch.no_grad():
        assert torch.equal(streamed(PROMPTS).logits, model(PROMPTS).logits)
    streamed.espnx_weights.close()


@needs_gguf
def test_generate_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = gguf_files.write(tmp_path / "tiny.gguf", gguf_files.tensors())
    (tmp_path / "prompts.txt").write_text("hello\nworld\n")
    words = [
        "generate",
        "--prompts",
        str(tmp_path / "prompts.txt"),
        "--storage",
        str(tmp_path / "kv"),
        "--max-new-tokens",
        "5",
    ]
    assert main([*words, "--model", str(file)]) == 0
    lines = [
        json.loads(line) for line in (tmp_path / "prompts.txt.out.jsonl").read_text().splitlines()
    ]
    expected = by_hand(file)
    for line, text in zip(
        sorted(lines, key=lambda line: line["id"]), ("hello", "world"), strict=True
    ):
        ids = torch.tensor([load_gguf(file)[1](text).input_ids])
        made = expected.generate(
            ids, max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=0
        )[0, ids.shape[1] :].tolist()
        assert line["tokens"] == made
    # which means the same file
    assert main([*words, "--model", str(tmp_path), "--out", str(tmp_path / "of-folder")]) == 0
    of_folder = [json.loads(line) for line in (tmp_path / "of-folder").read_text().splitlines()]
    assert [(line["id"], line["tokens"]) for line in of_folder] == [
        (line["id"], line["tokens"]) for line in lines
    ]
    assert (
        main([*words, "--model", str(file), "--memory", "1MiB", "--out", str(tmp_path / "other")])
        == 2
    )
    assert "save_pretrained" in capsys.readouterr().err


def test_the_fingerprint_of_a_file_is_of_all_its_bytes(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(bytes(5 << 20))
    before = model_fingerprint(str(file))
    assert before == model_fingerprint(str(tmp_path))
    changed = bytearray(5 << 20)
    changed[2 << 20] = 1
    file.write_bytes(changed)
    assert model_fingerprint(str(file)) != before


@needs_gguf
@pytest.mark.parametrize(
    "damage", ["cut", "garbage", "empty", "a tensor less", "architecture", "longer than it is"]
)
def test_files_that_are_not_whole(tmp_path: Path, damage: str) -> None:
    weights = gguf_files.tensors()
    if damage == "a tensor less":
        del weights["blk.1.ffn_up.weight"]
    file = gguf_files.write(
        tmp_path / "tiny.gguf",
        weights,
        architecture="nobodys" if damage == "architecture" else "llama",
    )
    whole = file.read_bytes()
    if damage == "cut":
        file.write_bytes(whole[: len(whole) // 2])
    elif damage == "garbage":
        file.write_bytes(b"no model at all" * 50)
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "longer than it is":  # the number of tensors
        file.write_bytes(whole[:8] + (10**9).to_bytes(8, "little") + whole[16:])
    with pytest.raises(errors.FormatError) as caught:
        load_gguf(file)
    assert caught.value.path == str(file) or str(file) in str(caught.value)


def test_which_file_is_meant(tmp_path: Path) -> None:
    assert find_gguf(tmp_path) is None
    assert find_gguf(tmp_path / "absent.gguf") is None
    (tmp_path / "a.gguf").touch()
    assert find_gguf(tmp_path) == find_gguf(tmp_path / "a.gguf") == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    assert find_gguf(tmp_path / "b.gguf") == tmp_path / "b.gguf"
    with pytest.raises(errors.InvalidInputError, match=r"a\.gguf, b\.gguf"):
        find_gguf(tmp_path)
    (tmp_path / "config.json").write_text("{}")  # an ordinary folder, whatever lies beside
    assert find_gguf(tmp_path) is None
    with pytest.raises(errors.InvalidInputError, match="no GGUF file"):
        load_gguf(tmp_path)


def test_without_the_packages_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.gguf").touch()
    monkeypatch.setattr(gguf_models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(errors.MissingDependencyError, match=r"no gguf, accelerate.*espnx\[gguf\]"):
        load_gguf(tmp_path)
