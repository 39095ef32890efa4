"""Models whose weights stay in their files: the tokens of the resident model, the budget, damage,
failing reads."""

from __future__ import annotations

import gc
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from espnx import errors
from espnx.integrations.streamed.load import load_streamed
from espnx.integrations.transformers.cache import KVCache
from espnx.integrations.transformers.enable import enable_kv_cache
from espnx.storage import FaultRule, FaultyEngine
from espnx.weights.safetensors_files import find_tensors
from tests.integrations.streamed.models import CONFIGS, GREEDY, IDS, LAYERS, MASK, least


def in_memory(model: PreTrainedModel) -> int:
    """Bytes of weights that a model's tensors and its stream's buffers hold."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in model.state_dict().values()
        if not t.is_meta
    }
    return sum(storages.values()) + model.espnx_weights.buffer_bytes


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["", "-sharded"])
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_and_logits_are_the_resident_models(
    name: str, kind: str, folders: Any, expected: Any
) -> None:
    reference, tokens = expected[name]
    folder = folders[name + kind]
    smallest = least(folder)
    for memory in (smallest, smallest + 200_000, "1GiB"):
        model = load_streamed(folder, memory)
        with torch.no_grad():
            assert torch.equal(
                model(IDS, attention_mask=MASK).logits, reference(IDS, attention_mask=MASK).logits
            )
        assert torch.equal(model.generate(IDS, attention_mask=MASK, **GREEDY), tokens)
        stats = model.espnx_stats()
        assert stats["layers_resident"] + stats["layers_streamed"] == LAYERS
        assert (
            in_memory(model)
            == stats["resident_bytes"] + stats["buffer_bytes"]
            <= stats["planned_bytes"]
            <= stats["budget_bytes"]
        )
        passes = 1 + GREEDY["max_new_tokens"]
        assert passes * stats["layers_streamed"] == stats["layer_reads"]
        assert stats["bytes_asked"] >= passes * stats["bytes_per_pass"]
        if memory == smallest:
            assert stats["layers_resident"] == 0
        if memory == "1GiB":
            assert stats["layers_streamed"] == stats["buffer_bytes"] == 0
        model.espnx_weights.close()


def test_a_byte_less_than_the_least_is_refused(folders: Any) -> None:
    smallest = least(folders["llama"])
    load_streamed(folders["llama"], smallest).espnx_weights.close()
    with pytest.raises(errors.InvalidInputError, match="too small"):
        load_streamed(folders["llama"], smallest - 1)
    assert least(folders["llama"], read_ahead=2) > smallest


def test_tied_weights_are_one(folders: Any) -> None:
    model = load_streamed(folders["qwen3"], "1GiB")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_dtype_converts_each_layer_when_it_arrives(name: str, folders: Any) -> None:
    folder = folders[name + "-sharded"]
    want = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = load_streamed(folder, least(folder, dtype=torch.bfloat16), dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config.dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, want(IDS).logits)


def test_the_files_dtype_stays(folders: Any, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folders["opt"], dtype=torch.float16).save_pretrained(
        tmp_path
    )
    model = load_streamed(tmp_path, "1GiB")
    assert {p.dtype for p in model.parameters()} == {torch.float16}


@pytest.mark.parametrize(
    ("name", "options"),
    [("llama", {}), ("opt", {"x_rows": 0}), ("opt", {"x_rows": 2}), ("opt", {})],
)
def test_kv_cache_on_ssd(
    name: str, options: Any, folders: Any, expected: Any, tmp_path: Path
) -> None:
    model = enable_kv_cache(load_streamed(folders[name], least(folders[name])))
    with KVCache(model.config, tmp_path, **options) as cache:
        assert torch.equal(
            model.generate(IDS, attention_mask=MASK, past_key_values=cache, **GREEDY),
            expected[name][1],
        )


class Broken:
    """Makes engines in which the nth read of a layer fails."""

    def __init__(self, **rule: Any):
        self.rule = FaultRule(operation="read", **rule)

    def __call__(self) -> FaultyEngine:
        return FaultyEngine([self.rule], pool_bytes=1 << 20)


def test_a_read_that_fails_in_enable(folders: Any, expected: Any) -> None:
    """It is the disk's error, not a model that is not supported; the model is as before and can be
    enabled."""
    place = find_tensors(folders["llama"])["model.layers.3.mlp.up_proj.weight"]
    broken = Broken(
        begin_bytes=place.offset_bytes + 8192,
        end_bytes=place.offset_bytes + 8193,
        nth=1,
        count=1,
        fault="error",
    )
    model = load_streamed(folders["llama"], least(folders["llama"]), engine=broken)
    with pytest.raises(errors.ReadError) as caught:
        enable_kv_cache(model)
    assert caught.value.path == place.path
    assert model.config._attn_implementation != "espnx"
    enable_kv_cache(model)
    with torch.no_grad():
        torch.testing.assert_close(
            model(IDS).logits, expected["llama"][0](IDS).logits, rtol=0, atol=1e-5
        )


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("rule", "error"),
    [
        ({"fault": "error"}, errors.ReadError),
        ({"fault": "short", "value": 0}, errors.ShortReadError),
    ],
)
@pytest.mark.parametrize("cached", ["none", "dynamic", "ssd"])
def test_a_failing_read_is_typed_and_the_model_goes_on(
    rule: Any, error: Any, cached: str, folders: Any, expected: Any, tmp_path: Path
) -> None:
    folder = folders["llama"]
    place = find_tensors(folder)["model.layers.3.mlp.up_proj.weight"]
    begin = place.offset_bytes + 8192
    # The fourth visit of layer 3 fails, after two of `enable_kv_cache` and one pass, whatever it is
    # tried: `short` is continued 16 times.
    broken = Broken(
        begin_bytes=begin,
        end_bytes=begin + 1,
        nth=4,
        count=1 if rule["fault"] == "error" else 40,
        **rule,
    )
    model = enable_kv_cache(load_streamed(folder, least(folder), engine=broken))
    reference, tokens = expected["llama"]
    cache = {
        "none": lambda: None,
        "dynamic": DynamicCache,
        "ssd": lambda: KVCache(model.config, tmp_path),
    }[cached]()
    with torch.no_grad():
        model(IDS, past_key_values=cache, use_cache=cache is not None)
        with pytest.raises(error) as caught:
            model(tokens[:, 9:10], past_key_values=cache, use_cache=cache is not None)
        assert caught.value.path == place.path
        assert all(parameter.is_meta for parameter in model.model.layers.parameters())
        if cached != "none":  # it is as it was before the pass that failed
            assert cache.get_seq_length() == 9
            if rule["fault"] == "error":
                got = model(tokens[:, 9:10], past_key_values=cache).logits
                past = reference(IDS, use_cache=True).past_key_values
                torch.testing.assert_close(
                    got, reference(tokens[:, 9:10], past_key_values=past).logits, rtol=0, atol=1e-5
                )
        if rule["fault"] == "error":
            assert torch.equal(model.generate(IDS, attention_mask=MASK, **GREEDY), tokens)


def test_a_layer_that_fails_gives_its_buffer_back(folders: Any, expected: Any) -> None:
    model = load_streamed(folders["llama"], least(folders["llama"]))
    whole = model.generate(IDS, attention_mask=MASK, **GREEDY)
    held = model.espnx_weights.buffer_bytes
    hook = model.model.layers[2].mlp.register_forward_pre_hook(
        lambda *_: (_ for _ in ()).throw(RuntimeError("no memory"))
    )
    with pytest.raises(RuntimeError, match="no memory"):
        model.generate(IDS, attention_mask=MASK, **GREEDY)
    hook.remove()
    assert all(parameter.is_meta for parameter in model.model.layers.parameters())
    assert torch.equal(model.generate(IDS, attention_mask=MASK, **GREEDY), whole)
    assert torch.equal(whole, expected["llama"][1])
    assert model.espnx_weights.buffer_bytes <= held


def test_a_closed_model_says_so(folders: Any) -> None:
    model = load_streamed(folders["llama"], least(folders["llama"]))
    model.espnx_weights.close()
    with torch.no_grad(), pytest.raises(errors.EngineClosedError):
        model(IDS)


def test_gradients_are_refused(folders: Any) -> None:
    model = load_streamed(folders["llama"], least(folders["llama"]))
    embedded = model.get_input_embeddings()(IDS).requires_grad_()
    with pytest.raises(errors.InvalidInputError, match="differentiated"):
        model(inputs_embeds=embedded)


# --- damage ---


def copied(folder: Path, target: Path) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def rewrite(file: Path, change: Any) -> None:
    """Changes a safetensors file's header."""
    raw = file.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    data = change(header, raw[8 + size :])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def rename(header: Any, data: bytes) -> bytes:
    header["model.norm.weights"] = header.pop("model.norm.weight")
    return data


def leave_over(header: Any, data: bytes) -> bytes:
    header["model.layers.9.extra"] = {
        "dtype": "F32",
        "shape": [2],
        "data_offsets": [len(data), len(data) + 8],
    }
    return data + bytes(8)


def transpose(header: Any, data: bytes) -> bytes:
    header["model.layers.1.mlp.up_proj.weight"]["shape"].reverse()
    return data


def set_dtype(header: Any, data: bytes) -> bytes:
    header["model.layers.1.mlp.up_proj.weight"]["dtype"] = "F4"
    return data


def overlap(header: Any, data: bytes) -> bytes:
    first, second = (
        header["model.layers.1.mlp.up_proj.weight"],
        header["model.layers.1.mlp.gate_proj.weight"],
    )
    first["data_offsets"] = second["data_offsets"]
    return data


def wrong_size(header: Any, data: bytes) -> bytes:
    header["model.norm.weight"]["data_offsets"][1] -= 4
    return data


DAMAGE = {
    "missing tensor": (
        rename,
        errors.FormatError,
        "missing: model.norm.weight|no place for: model.norm.weights",
    ),
    "extra tensor": (leave_over, errors.FormatError, "no place for: model.layers.9.extra"),
    "wrong shape": (transpose, errors.FormatError, "shape of model.layers.1.mlp.up_proj"),
    "unknown dtype": (set_dtype, errors.FormatError, "'F4'"),
    "overlap": (overlap, errors.FormatError, "without holes or overlap"),
    "wrong size": (wrong_size, errors.FormatError, "size of model.norm.weight"),
    "trailing bytes": (lambda header, data: data + b"x", errors.FormatError, "as its header says"),
    "cut by a byte": (lambda header, data: data[:-1], errors.TruncatedFileError, "cut"),
    "no data": (lambda header, data: b"", errors.TruncatedFileError, "cut"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_before_anything_is_read(kind: str, folders: Any, tmp_path: Path) -> None:
    change, error, message = DAMAGE[kind]
    folder = copied(folders["llama"], tmp_path / "model")
    rewrite(folder / "model.safetensors", change)
    with pytest.raises(error, match=message) as caught:
        load_streamed(folder, "1GiB")
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\1\2\3",
        struct.pack("<Q", 2**40),
        struct.pack("<Q", 4) + b"{}{}",
        struct.pack("<Q", 2) + b"[]",
    ],
)
def test_what_is_no_safetensors_file(content: bytes, folders: Any, tmp_path: Path) -> None:
    folder = copied(folders["llama"], tmp_path / "model")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises((errors.FormatError, errors.TruncatedFileError)):
        load_streamed(folder, "1GiB")


def test_index_and_shards_must_agree(folders: Any, tmp_path: Path) -> None:
    folder = copied(folders["llama-sharded"], tmp_path / "model")
    index = folder / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    for places, message in [
        ({**whole["weight_map"], "model.norm.weight": "../model.safetensors"}, "plain file name"),
        (
            {**whole["weight_map"], "model.norm.weight": "model-00099-of-00099.safetensors"},
            "no file",
        ),
        (
            {**whole["weight_map"], "model.nothing": next(iter(whole["weight_map"].values()))},
            "no model.nothing",
        ),
        ({}, "no weight_map"),
        ([], "field weight_map"),
    ]:
        index.write_text(json.dumps({"weight_map": places}))
        with pytest.raises(errors.FormatError, match=message):
            load_streamed(folder, "1GiB")
    index.write_text("{")
    with pytest.raises(errors.FormatError, match="JSON"):
        load_streamed(folder, "1GiB")
    shard = sorted(set(whole["weight_map"].values()))[0]
    index.write_text(json.dumps(whole))
    (folder / "model-extra.safetensors").write_bytes((folder / shard).read_bytes())
    name = next(name for name, file in whole["weight_map"].items() if file == shard)
    index.write_text(
        json.dumps({"weight_map": {**whole["weight_map"], name: "model-extra.safetensors"}})
    )
    with pytest.raises(errors.FormatError, match="a second time"):
        load_streamed(folder, "1GiB")


def test_folders_that_are_no_decoder(folders: Any, tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidInputError, match=r"config\.json"):
        load_streamed(tmp_path, "1GiB")
    transformers.T5Config().save_pretrained(tmp_path)
    with pytest.raises(errors.InvalidInputError, match="encoder-decoder"):
        load_streamed(tmp_path, "1GiB")
    (tmp_path / "config.json").write_text('{"model_type": "no such model"}')
    with pytest.raises(errors.InvalidInputError):
        load_streamed(tmp_path, "1GiB")
    CONFIGS["llama"].save_pretrained(tmp_path)
    with pytest.raises(errors.InvalidInputError, match="neither"):
        load_streamed(tmp_path, "1GiB")
    with pytest.raises(errors.InvalidInputError, match="read_ahead"):
        load_streamed(folders["llama"], "1GiB", read_ahead=0)


def test_experts_that_lack_a_part(folders: Any, tmp_path: Path) -> None:
    folder = copied(folders["mixtral"], tmp_path / "model")

    def drop(header: Any, data: bytes) -> bytes:
        header["model.layers.4.block_sparse_moe.experts.7.w1.weight"] = header.pop(
            "model.layers.4.block_sparse_moe.experts.1.w1.weight"
        )
        header["model.layers.4.block_sparse_moe.experts.1.w2.weight"]["shape"].reverse()
        return data

    rewrite(folder / "model.safetensors", drop)
    with pytest.raises(errors.FormatError, match=r"experts"):
        load_streamed(folder, "1GiB")


def test_peak_memory_of_a_model_several_times_its_budget(tmp_path: Path) -> None:
    """In a process of its own: RSS grows by no more than the budget and what one forward pass
    computes with."""
    config = transformers.LlamaConfig(
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=16,
        num_attention_heads=6,
        num_key_value_heads=6,
        vocab_size=97,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path, max_shard_size="50MB")
    gc.collect()
    program = """
import sys, torch
from espnx.integrations.streamed.load import load_streamed
def peak():
    lines = open("/proc/self/status")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
torch.nn.functional.linear(torch.ones(4, 384), torch.ones(384, 384))
before = peak()
model = load_streamed(sys.argv[1], "30MiB")
model.generate(torch.arange(8)[None], max_new_tokens=3, do_sample=False, pad_token_id=0)
stats = model.espnx_stats()
print(peak() - before, stats["bytes_per_pass"], stats["budget_bytes"], stats["layers_resident"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    grown, streamed, budget, resident = map(int, done.stdout.split())
    assert streamed > 4 * budget
    assert resident > 0
    # Beside the budget: Python objects of the model, modules imported late, the engine's rings and
    # buffers; 18 MiB where it was measured.
    assert grown < budget + (40 << 20)
