"""lm-evaluation-harness through a `KVCache`: the answers are those of the harness's own model, and
the bytes went over the disk."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")

import tokenizers
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import PreTrainedTokenizerFast

from espnx import errors
from espnx.integrations.lm_eval import EspnxLM
from espnx.storage import FaultRule, FaultyEngine
from tests.integrations.transformers.tiny import make

ROOT = Path(__file__).resolve().parents[2]
TASKS = Path(__file__).resolve().parents[1] / "data" / "lm_eval"
PAGE = ROOT / "docs" / "flexgen-lm-eval.md"
LETTERS = [chr(code) for code in range(32, 127)]
# Other people's: multiprocess and datasets fork, rouge and others use what will go.
pytestmark = pytest.mark.filterwarnings("ignore")


def tokenizer() -> Any:
    """A token for each printable character."""
    names = ["<pad>", "<s>", "</s>", *LETTERS]
    model = tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="?")
    whole = tokenizers.Tokenizer(model)
    whole.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"."), "isolated")
    whole.decoder = tokenizers.decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=whole, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="?"
    )


def model(name: str) -> Any:
    return make(name, vocab_size=len(LETTERS) + 3)


def theirs(name: str, **options: Any) -> HFLM:
    return HFLM(pretrained=model(name), tokenizer=tokenizer(), **{"batch_size": 3} | options)


def ours(name: str, folder: Path, **options: Any) -> EspnxLM:
    return EspnxLM(
        model(name),
        tokenizer=tokenizer(),
        storage=str(folder),
        **{"batch_size": 3, "spill_interval": 8} | options,
    )


def requests(pairs: list[tuple[str, str]]) -> list[Instance]:
    return [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=i)
        for i, pair in enumerate(pairs)
    ]


def texts() -> list[tuple[str, str]]:
    rows = [json.loads(line) for line in (TASKS / "sentences.jsonl").read_text().splitlines()]
    return [(row["text"], choice) for row in rows for choice in row["choices"]]


def assert_scores(got: list[tuple[float, bool]], wanted: list[tuple[float, bool]]) -> None:
    """Sums of at most 60 fp32 log probabilities, whose logits agree to about 1e-4
    (docs/tolerances.md)."""
    assert [greedy for _, greedy in got] == [greedy for _, greedy in wanted]
    for (a, _), (b, _) in zip(got, wanted, strict=True):
        assert a == pytest.approx(b, abs=60 * 1e-4)


def test_tasks_from_files(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    found = {}
    for lm in (theirs("llama"), ours("llama", folder, verify=True)):
        found[type(lm)] = simple_evaluate(
            lm,
            tasks=["espnx_continue", "espnx_choose"],
            task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
            bootstrap_iters=0,
        )
    a, b = found[HFLM], found[EspnxLM]
    for task in ("espnx_continue", "espnx_choose"):
        assert len(b["samples"][task]) == 5
        assert b["results"][task] == a["results"][task]
    said = [[sample["resps"] for sample in each["samples"]["espnx_continue"]] for each in (a, b)]
    assert said[0] == said[1]
    assert any(text[0][0] for text in said[0])
    stats = lm.cache_stats  # the last one's
    assert len(stats) >= 4
    assert all(each["tokens"] for each in stats)
    assert any(each["bytes_asked"] for each in stats)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("name", ["llama", "opt", "gpt2", "gemma3"])
@pytest.mark.parametrize(
    "options",
    [{}, {"verify_chunk": 4, "prefill_chunk": 7}, {"batch_size": 1, "x_rows": 1}],
    ids=str,
)
def test_verified_likelihoods(folder: Path, name: str, options: dict[str, Any]) -> None:
    pairs = texts()[:: 1 if name == "llama" else 2]
    lm = ours(name, folder, verify=True, **options)
    assert_scores(
        lm.loglikelihood(requests(pairs), disable_tqdm=True),
        theirs(name).loglikelihood(requests(pairs), disable_tqdm=True),
    )
    assert sum(stats["bytes_asked"] for stats in lm.cache_stats) > 0


def test_a_greedy_continuation_is_greedy(folder: Path) -> None:
    lm = ours("llama", folder, verify=True)
    text = "Rows of keys and values"
    ids = torch.tensor([lm.tok_encode(text)])
    said = lm._model_generate(ids, ids.shape[1] + 9, [], attention_mask=torch.ones_like(ids))[
        0, ids.shape[1] :
    ].tolist()
    changed = [*said[:-1], (said[-1] + 1) % 90 + 3]
    answers = lm._loglikelihood_tokens(
        [(None, ids[0].tolist(), each) for each in (said, changed, said[:1])]
    )
    assert [greedy for _, greedy in answers] == [True, False, True]


def test_rolling_windows_and_truncation(folder: Path) -> None:
    """A text longer than the model's length goes in windows; a context that is too long loses its
    left."""
    long = "".join(text + choice for text, choice in texts())
    each = Instance(request_type="loglikelihood_rolling", doc={}, arguments=(long[:70],), idx=0)
    options = {"max_length": 33}
    lm, known = ours("llama", folder, verify=True, **options), theirs("llama", **options)
    got, wanted = (side.loglikelihood_rolling([each], disable_tqdm=True)[0] for side in (lm, known))
    assert got == pytest.approx(wanted, abs=70 * 1e-4)
    pairs = [(long[:50], long[50:60]), (long[:40], long[40 : 40 + 33]), (long[:10], "x")]
    assert_scores(
        lm.loglikelihood(requests(pairs), disable_tqdm=True),
        known.loglikelihood(requests(pairs), disable_tqdm=True),
    )


def test_through_emulated_accelerators(folder: Path) -> None:
    """The paper's own check. Rows, queries and results in fp16 cost less than the framework's
    computing in fp16 throughout."""
    pairs = texts()
    exact, theirs_in_half = (
        torch.tensor([score for score, _ in lm.loglikelihood(requests(pairs), disable_tqdm=True)])
        for lm in (
            theirs("llama"),
            HFLM(pretrained=model("llama").half(), tokenizer=tokenizer(), batch_size=3),
        )
    )
    lm = ours("llama", folder, verify=True, format="fp16", storage_device="smartssd", stretch=0)
    scores = torch.tensor(
        [score for score, _ in lm.loglikelihood(requests(pairs), disable_tqdm=True)]
    )
    assert all(each["layers_attended_on_host"] == 0 for each in lm.cache_stats)
    assert any(each["bytes_asked"] for each in lm.cache_stats)
    apart, own = ((each - exact).square().mean().sqrt() for each in (scores, theirs_in_half))
    assert 0 < float(apart) <= float(own)


def test_without_verify_likelihoods_are_the_harness_s(folder: Path) -> None:
    lm, pairs = ours("llama", folder), texts()[:4]
    assert_scores(
        lm.loglikelihood(requests(pairs), disable_tqdm=True),
        theirs("llama").loglikelihood(requests(pairs), disable_tqdm=True),
    )
    assert lm.cache_stats == []


def test_a_damaged_disk_is_an_error(folder: Path) -> None:
    """What `verify` is for: with damaged rows no score comes out."""
    lm = ours(
        "llama",
        folder,
        verify=True,
        engine=lambda: FaultyEngine([FaultRule(operation="read", fault="flip", value=3)]),
    )
    with pytest.raises(errors.ChecksumError):
        lm.loglikelihood(requests(texts()[:3]), disable_tqdm=True)
    with pytest.raises(errors.ChecksumError):
        lm._model_generate(
            torch.arange(3, 33)[None], 50, [], attention_mask=torch.ones(1, 30, dtype=torch.long)
        )


@pytest.mark.parametrize(
    "options",
    [
        {"storage": ""},
        {"verify_chunk": 0},
        {"prefill_chunk": "7"},
        {"x_rows": -1},
        {"x_rows": "all"},
        {"format": "int3"},
    ],
    ids=str,
)
def test_options_out_of_range(folder: Path, options: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidInputError):
        lm = EspnxLM(
            model("llama"), tokenizer=tokenizer(), **{"storage": [folder], "verify": True} | options
        )
        lm.loglikelihood(requests([("one", "two")]), disable_tqdm=True)


def test_requests_that_nothing_can_answer(folder: Path) -> None:
    lm = ours("llama", folder, verify=True, batch_size="auto")
    with pytest.raises(errors.InvalidInputError, match="batch"):
        lm.loglikelihood(requests([("one", "two")]), disable_tqdm=True)
    lm = ours("llama", folder, verify=True, max_length=5)
    for context, continuation in (([], [3]), ([3], []), ([3], [3] * 6)):
        with pytest.raises(errors.InvalidInputError, match="request"):
            lm._loglikelihood_tokens([(None, context, continuation)])
    assert lm._loglikelihood_tokens([]) == []


@pytest.mark.slow
def test_the_page_and_the_command_line(tmp_path: Path) -> None:
    """The files and the command that the documentation shows."""
    page = PAGE.read_text()
    for name, text in re.findall(
        r"^`(tasks/[\w.]+)`:\n\n```\w+\n(.*?)^```", page, re.MULTILINE | re.DOTALL
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert (tmp_path / "tasks" / "capitals.yaml").exists()
    model("llama").save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (line,) = re.findall(r"^```sh\n(python -m espnx.*?)^```", page, re.MULTILINE | re.DOTALL)
    words = shlex.split(line)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HOME": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, *words[1:], "--output_path", "out.json"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"capitals.*exact_match", done.stdout), done.stdout
    (result,) = tmp_path.glob("out*.json")
    assert json.loads(result.read_text())["config"]["model"] == "espnx"
