"""Every causal model of the installed transformers, tiny: does it generate with a cache on SSD what
it generates with the framework's own?

Either the tokens are the same, or `enable_kv_cache` says what is not supported and leaves the model
as it was. Each model runs in a child process with a limit on memory and time, so that one that
cannot be made or does not end costs the others nothing.
"""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from espnx.errors import EspnxError

CONFIGS = Path(__file__).resolve().parents[2] / "tests" / "data" / "models.json"
LENGTHS, NEW = (150, 90, 131), 16
_MEMORY_BYTES, _SECONDS = 24 << 30, 150
_WINDOW_FIELDS = ("sliding_window", "attention_window_size", "attention_chunk_size")


def names() -> list[str]:
    """The causal models that the installed transformers maps."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def load_configs() -> dict[str, Any]:
    return dict(json.loads(CONFIGS.read_text(encoding="utf-8")))


def fields_of(config: type) -> set[str]:
    """Options that a config class takes."""
    return {name for each in config.__mro__ for name in getattr(each, "__annotations__", {})} | set(
        getattr(config, "attribute_map", None) or {}
    )


def small(config: type, shared: Mapping[str, Any]) -> dict[str, Any]:
    """Its small options, and those of the configs inside it."""
    known, renamed = fields_of(config), getattr(config, "attribute_map", None) or {}
    found = {name: value for name, value in shared.items() if name in known and name not in renamed}
    found |= {renamed[name]: value for name, value in shared.items() if renamed.get(name) in known}
    for name, inner in (getattr(config, "sub_configs", None) or {}).items():
        if options := small(inner, shared):
            found[name] = options
    return found


def merged(options: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`more` goes first; None takes an option away, so that the config's own default holds."""
    both = dict(options)
    for name, value in more.items():
        if isinstance(value, dict) and isinstance(both.get(name), dict):
            both[name] = merged(both[name], value)
        else:
            both[name] = value
    return {
        name: value for name, value in both.items() if value is not None or name in _WINDOW_FIELDS
    }


def variants(name: str, configs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Options of a model's variants: as listed, and without its window where it has one."""
    own = dict(configs["models"].get(name, {}))
    found = {"": own} | {
        title: own | more for title, more in configs["variants"].get(name, {}).items()
    }
    if "sliding_window" in fields_of(_classes(name)[1]) and "sliding_attention" not in (
        own.get("layer_types") or ()
    ):
        found["no window"] = own | {"sliding_window": None}
    return found


def _classes(name: str) -> tuple[Any, Any]:
    """Model and config class."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])
    return model, model.config_class or CONFIG_MAPPING[name]


def build(name: str, options: Mapping[str, Any], shared: Mapping[str, Any]) -> Any:
    """A tiny random model, the same every time, whose attention matters."""
    import torch

    model_class, config_class = _classes(name)
    if name == "gemma3n":
        _stand_in_for_timm()
    options = dict(options)
    scale = options.pop("scale", 0.25)
    config = config_class(**merged(small(config_class, shared), options))
    if "is_decoder" in fields_of(config_class):
        config.is_decoder = True
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config).eval()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() >= 2 and not 0.1 < float(weight.std()) < 1:
                    weight.normal_(0, scale)
    if name == "xmod":
        model.set_default_language("en_XX")
    model.generation_config.update(pad_token_id=0, eos_token_id=None, bos_token_id=1)
    return model


def _stand_in_for_timm() -> None:
    """Gemma 3n sees through a model of timm, which brings torchvision. Text does not pass it: an
    empty one takes its place."""
    from transformers import AutoModel, Gemma3nVisionConfig, PreTrainedModel

    class NoVision(PreTrainedModel):
        config_class = Gemma3nVisionConfig

    AutoModel.register(Gemma3nVisionConfig, NoVision, exist_ok=True)


def check(
    name: str,
    options: Mapping[str, Any],
    shared: Mapping[str, Any],
    lengths: Sequence[int] = LENGTHS,
    new: int = NEW,
) -> dict[str, Any]:
    """One variant of one model.

    Returns:
        `outcome`: ``equal``, ``refused``, ``not run`` (the framework itself does not generate with
        it) or, which must not be, ``other tokens`` or ``untyped``; `why`; what was stored and read,
        and for X rows by default and by name what came of it.
    """
    import torch
    from transformers import DynamicCache

    import espnx

    made = {
        "outcome": "not run",
        "why": "",
        "bytes_asked": 0,
        "layers_on_ssd": 0,
        "layers_in_memory": 0,
        "x_rows": {},
    }
    try:
        model = build(name, options, shared)
    except Exception as error:
        return made | {"why": _said(error)}
    ids = torch.randint(
        3, 100, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(0)
    )
    mask = (torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]).long()
    asked = {"max_new_tokens": new, "do_sample": False, "attention_mask": mask}

    def run(cache: Any) -> Any:
        torch.manual_seed(0)
        return model.generate(
            ids * mask, **asked | ({} if cache is None else {"past_key_values": cache})
        )

    wanted = None
    try:
        wanted = run(DynamicCache(config=model.config.get_text_config(decoder=True)))
    except Exception as error:
        made["why"] = _said(error)
    made["framework_generates"] = wanted is not None
    before = model.config._attn_implementation
    try:
        espnx.enable_kv_cache(model)
    except EspnxError as error:
        unchanged = model.config._attn_implementation == before
        return made | {
            "outcome": "refused" if unchanged else "changed and refused",
            "why": str(error),
        }
    except Exception as error:
        return made | {"outcome": "untyped", "why": _said(error)}
    if wanted is None:
        return made
    if not torch.equal(run(None), wanted):
        return made | {"outcome": "other tokens", "why": "without a cache"}
    for x_rows in (0, None, 2):
        made |= _with_cache(model, run, wanted, x_rows, made)
        if made["outcome"] != "equal":
            return made
    return made


def _with_cache(
    model: Any, run: Any, wanted: Any, x_rows: int | None, made: dict[str, Any]
) -> dict[str, Any]:
    import torch

    import espnx

    title = "default" if x_rows is None else str(x_rows)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with espnx.KVCache(model.config, folder, x_rows=x_rows) as cache:
                is_equal, stats = torch.equal(run(cache), wanted), cache.stats()
        except EspnxError as error:
            # X rows that were asked for by name may be refused
            outcome = "equal" if x_rows else "late refusal"
            return {
                "outcome": outcome,
                "why": str(error),
                "x_rows": made["x_rows"] | {title: "refused"},
            }
        except Exception as error:
            return {"outcome": "untyped", "why": f"x_rows={x_rows}: {_said(error)}"}
    found = {
        "outcome": "equal" if is_equal else "other tokens",
        "x_rows": made["x_rows"] | {title: f"{stats['x_rows']} of {stats['sequences']}"},
    }
    if not is_equal:
        found["why"] = f"x_rows={x_rows}"
    return (
        found
        if x_rows
        else found
        | {name: stats[name] for name in ("bytes_asked", "layers_on_ssd", "layers_in_memory")}
    )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


# --- children ---


def sweep(
    asked: Sequence[str], done: Mapping[str, Any]
) -> Iterator[tuple[str, list[dict[str, Any]], float]]:
    """(name, its variants' outcomes, seconds) of each model that is not done yet."""
    child: subprocess.Popen[str] | None = None
    for name in asked:
        if name in done:
            continue
        if child is None:
            child = _child()
        begun = time.monotonic()
        line = _answer(child, name)
        if line is None:
            child.kill()
            child.communicate()
            child = None
            yield (
                name,
                [
                    {
                        "variant": "",
                        "outcome": "not run",
                        "why": f"no answer in {_SECONDS} s, or more memory than it may have",
                    }
                ],
                _SECONDS,
            )
        else:
            yield name, json.loads(line), time.monotonic() - begun
    if child is not None:
        child.communicate()


def _child() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", __name__]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def _answer(child: subprocess.Popen[str], name: str) -> str | None:
    if child.stdin is None or child.stdout is None:
        return None
    try:
        child.stdin.write(name + "\n")
        child.stdin.flush()
    except OSError:
        return None
    ready, _, _ = select.select([child.stdout], [], [], _SECONDS)
    return (child.stdout.readline() or None) if ready else None


def serve(lines: IO[str]) -> None:
    """Answers each line's model with a line of JSON."""
    import torch
    from transformers.utils import logging

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    configs, answers = load_configs(), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a model prints is no answer
    for line in lines:
        name, found = line.strip(), []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for title, options in variants(name, configs).items():
                one = {"variant": title} | check(name, options, configs["shared"])
                if one["outcome"] == "not run" and name in configs["not_alone"]:
                    one["why"] = f"{configs['not_alone'][name]} ({one['why']})"
                # else it cannot be without one
                if title != "no window" or one.get("framework_generates"):
                    found.append(one)
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.stdin)
