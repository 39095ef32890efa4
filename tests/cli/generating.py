"""What the tests of ``espnx generate`` share: a tiny model's folder, prompts, and what the
framework generates for them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

from espnx.cli.main import main
from tests.integrations.transformers.tiny import VOCABULARY, plain

tokenizers = pytest.importorskip("tokenizers")

NEW = 6
#: In words: of like length and not; one of each end.
LENGTHS = [3, 30, 31, 4, 29, 60, 3, 30, 1, 28]
PROMPTS = [" ".join(f"w{(7 * i + 3 * k) % 90}" for k in range(n)) for i, n in enumerate(LENGTHS)]


def save(path: Path, made: PreTrainedModel) -> Path:
    """A model's folder, with a tokenizer of words."""
    made.save_pretrained(path)
    words = {"<pad>": 0, "<s>": 1, "<unk>": 2} | {f"w{i}": i + 3 for i in range(VOCABULARY - 3)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(path)
    return path


def run(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str, str]:
    code = main(["generate", *(str(word) for word in words)])
    return code, *capsys.readouterr()


def options(model: Path, folder: Path, prompts: Path) -> list[Any]:
    return [
        "--model",
        model,
        "--prompts",
        prompts,
        "--storage",
        folder / "rows",
        "--max-new-tokens",
        NEW,
    ]


@functools.cache
def wanted(text: str, **more: Any) -> list[int]:
    """Of the framework, for this prompt alone."""
    ids = torch.tensor([[int(word[1:]) + 3 for word in text.split()]])
    found = plain("llama").generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=DynamicCache(config=plain("llama").config),
        max_new_tokens=NEW,
        **{"do_sample": False} | more,
    )
    return found[0, ids.shape[1] :].tolist()


def results(path: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["id"]: line for line in lines}
    assert len(found) == len(lines), "a prompt came twice"
    return found


def write(path: Path, prompts: list[str]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text(
            "".join(
                json.dumps({"id": f"p{i}", "prompt": text}) + "\n" for i, text in enumerate(prompts)
            )
        )
    else:
        path.write_text("\n".join(prompts) + "\n\n")
    return path


def check(
    found: dict[str, dict[str, Any]], ids: list[str], prompts: list[str] = PROMPTS, **more: Any
) -> None:
    assert set(found) == set(ids)
    for name, text in zip(ids, prompts, strict=True):
        tokens = wanted(text, **more)
        assert found[name]["tokens"] == tokens, name
        assert found[name]["text"].split() == [
            f"w{token - 3}" if token > 2 else "" for token in tokens if token > 2
        ]
        assert found[name]["prompt_tokens"] == len(text.split())
