"""A text that is continued: its first pass over what is stored brings rows for drafts; and reads
that run ahead while drafts are made serve the pass, whatever its number of tokens."""

from __future__ import annotations

import errno
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

import espnx
from espnx import errors
from espnx.device.rows.file import UNIT_BYTES
from espnx.device.rows.ssd import SsdRowDevice
from espnx.integrations.transformers.cache import KVCache
from espnx.integrations.transformers.speculation import decoding
from espnx.kv import attention
from espnx.kv.draft.pace import Pace
from espnx.kv.read_ahead import ReadAhead
from espnx.kv.striping import StripedDevices
from espnx.storage import FaultRule, FaultyEngine
from tests.integrations.transformers.speculation.drafts import drafting, one_by_one, speculated
from tests.integrations.transformers.tiny import enabled, generate, prompt
from tests.storage.common import until

KINDS = ("pages", "4bit")


@pytest.fixture
def without_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model alone proposes."""
    monkeypatch.setattr(decoding, "continuation", lambda tokens, n: [])


def kept(folder: Path, lengths: list[int], new: int) -> dict[str, torch.Tensor]:
    """A kept cache of prompts, and prompts with so many tokens more."""
    held = prompt(lengths)
    with KVCache(enabled("llama").config, folder, name="talk", spill_interval=8) as cache:
        generate(enabled("llama"), held, cache, max_new_tokens=1)  # which is not fed
    more = prompt([new] * len(lengths), seed=4)
    return {name: torch.cat([held[name], more[name]], dim=1) for name in held}


def reopened(folder: Path, kind: str, **options: Any) -> KVCache:
    return KVCache(
        enabled("llama").config, folder, name="talk", draft=kind, spill_interval=8, **options
    )


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("without_lookup")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("lengths", "new"), [([150], 1), ([150, 80, 30], 1), ([90, 150], 12)])
def test_the_pass_that_reads_the_prompt_brings_rows_for_drafts(
    folder: Path, kind: str, lengths: list[int], new: int
) -> None:
    asked = kept(folder, lengths, new)
    wanted = one_by_one("llama", asked, max_new_tokens=20)
    with reopened(folder, kind) as cache:
        got = speculated("llama", asked, cache, max_new_tokens=20, gamma=4)
        said = cache.stats()
    assert torch.equal(got, wanted)
    gammas = [each["gamma"] for each in said["speculation"]["decisions"]]
    assert gammas[0] == 4
    assert said["decode_tokens"] + said["prefill_tokens"] >= 19 * len(lengths)


@pytest.mark.usefixtures("without_lookup")
@pytest.mark.parametrize("chunk", [None, 8])
def test_longer_prompts_are_computed_in_chunks(folder: Path, chunk: int | None) -> None:
    """Then the first pass over single positions brings them."""
    asked = kept(folder, [150], 30)
    wanted = one_by_one("llama", asked, max_new_tokens=12)
    more = {} if chunk is None else {"prefill_chunk_size": chunk}
    with reopened(folder, "pages") as cache:
        got = speculated("llama", asked, cache, max_new_tokens=12, gamma=4, **more)
        gammas = [each["gamma"] for each in cache.stats()["speculation"]["decisions"]]
    assert torch.equal(got, wanted)
    assert gammas[:2] == [0, 4]


@pytest.mark.usefixtures("without_lookup")
def test_the_first_number_is_chosen_by_that_pass(folder: Path) -> None:
    asked = kept(folder, [150], 1)
    wanted = one_by_one("llama", asked, max_new_tokens=20)
    with reopened(folder, "pages") as cache:
        got = speculated("llama", asked, cache, max_new_tokens=20, gamma=None)
        said = cache.stats()["speculation"]
    assert torch.equal(got, wanted)
    assert said["decisions"][0]["gamma"] > 0
    assert "a pass over one position" in said["decisions"][0]["why"]
    assert said["predicted_s"] > 0
    assert said["measured_s"] > 0


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("without_lookup")
@pytest.mark.parametrize(
    ("fault", "value"), [("error", errno.EIO), ("flip", 801), ("delay", 600_000_000)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_read_of_that_pass_fails(folder: Path, kind: str, fault: str, value: int) -> None:
    """As any error, and the cache is as before."""
    held, new = prompt([150]), prompt([1], seed=4)
    asked = {name: torch.cat([held[name], new[name]], dim=1) for name in held}
    wanted = one_by_one("llama", asked, max_new_tokens=20)
    made = list[FaultyEngine]()

    def make_engine() -> FaultyEngine:
        rule = FaultRule(fault, operation="read", nth=2, count=1, value=value)
        made.append(FaultyEngine([rule], poison=True, pool_bytes=1 << 20))
        return made[-1]

    options: dict[str, Any] = {"engine": make_engine, "spill_interval": 8, "deadline_s": 0.2}
    with KVCache(enabled("llama").config, folder, draft=kind, **options) as cache:
        generate(enabled("llama"), held, cache, max_new_tokens=1)  # which is not fed
        with pytest.raises(errors.StorageError):
            speculated("llama", asked, cache, max_new_tokens=20)
        assert cache.get_seq_length() == 150
        assert cache.store.proposal is None
        got = speculated("llama", asked, cache, max_new_tokens=20)
    for engine in made:
        engine.close()
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("gammas", [(8, 3, 16, 0, 5)])
def test_reads_ahead_serve_a_pass_over_any_number_of_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch, gammas: tuple[int, ...]
) -> None:
    """What attends at a time depends on the number of queries; what was read ahead is not thrown
    away for that."""
    asked = kept(folder, [64] * 6, 1)
    wanted = one_by_one("llama", asked, max_new_tokens=40)
    drafting(monkeypatch, wanted, right=0.9)
    # the queries of two sequences of 17 tokens, or of 34 of one
    shape = enabled("llama").config
    each = 4 * shape.num_attention_heads * shape.head_dim
    monkeypatch.setattr(attention, "_PART_BYTES", 34 * each)
    forgotten, turn = 0, iter(gammas * 20)
    forget, room = ReadAhead.forget, decoding.Decoding._room

    def counted(self: ReadAhead) -> None:
        nonlocal forgotten
        forgotten += 1
        forget(self)

    now = 0

    def drafts(self: Any) -> Any:
        nonlocal now
        now = next(turn)
        return make_drafts(self)

    make_drafts = decoding.Decoding._drafts
    monkeypatch.setattr(decoding.Decoding, "_drafts", drafts)
    monkeypatch.setattr(decoding.Decoding, "_room", lambda self, row: min(now, room(self, row)))
    monkeypatch.setattr(ReadAhead, "forget", counted)
    with reopened(folder, "lookup", x_rows=0) as cache:
        before = forgotten
        decoded = speculated("llama", asked, cache, max_new_tokens=40, gamma=16)
        said = cache.stats()["speculation"]
        during = forgotten - before
    assert torch.equal(decoded, wanted)
    assert len({each["gamma"] for each in said["decisions"]}) > 2
    # the first pass, sequences that end before others, and the end
    assert during <= 2 + 2 * len(asked["input_ids"])
    assert said["passes"] > 6


@pytest.mark.usefixtures("without_lookup")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window_bytes", [64 << 10, 8 << 20])
def test_the_disk_reads_while_drafts_are_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, window_bytes: int
) -> None:
    """Before a pass begins as many of its bytes were asked for as may be read ahead, or all."""
    inputs = prompt([400])
    ahead, forward = list[int](), decoding.Decoding._forward

    def watched(self: Any, own: Any, n: int, begin: int, done: int = 0) -> torch.Tensor:
        store = self._cache.store
        if n > 1 and not store.proposal.is_drafting:
            device = store.striped.devices[0]
            asked = device.engine.stats().bytes_asked - store.striped.stats().bytes_written
            ahead.append(asked - store.striped.stats().bytes_asked)
        return forward(self, own, n, begin, done)

    monkeypatch.setattr(decoding.Decoding, "_forward", watched)
    options: dict[str, Any] = {"read_ahead_bytes": window_bytes, "spill_interval": 400}
    with KVCache(enabled("llama").config, folder, draft=kind, **options) as cache:
        got = speculated("llama", inputs, cache, max_new_tokens=30, gamma=4)
        stored = cache.store.striped.stats().stored_bytes
    assert torch.equal(got, one_by_one("llama", inputs, max_new_tokens=30))
    unit = 960 << 10
    assert len(ahead) > 2
    assert min(ahead) >= min(stored, window_bytes) - min(unit, window_bytes // 2)


@pytest.mark.usefixtures("without_lookup")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", [0, 2 << 20, 1 << 30])
def test_reads_go_further_ahead_while_drafts_are_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, limit: int
) -> None:
    """Into no more memory than is given; also behind a sequence that has ended, with which all that
    was read is gone. The tokens are the same, and afterwards reads go as far ahead as always."""
    asked = kept(folder, [400, 390, 380], 1)
    free = one_by_one("llama", asked, max_new_tokens=30)
    ends = {"max_new_tokens": 30, "eos_token_id": [int(free[0, 409]), int(free[1, 417])]}
    wanted, found = one_by_one("llama", asked, **ends), dict[int, int]()
    forward = decoding.Decoding._forward

    def waiting(self: Any, own: Any, n: int, begin: int, done: int = 0) -> torch.Tensor:
        """A draft is as long as the disk needs."""
        store = self._cache.store
        if store.proposal.is_drafting and done == 0:
            stored, window = store.striped.stats().stored_bytes, self._tally.reach.window_bytes
            # of the rows that passes ask for, which after an end are those of fewer sequences
            least = min(stored * len(own) // 3, window) - UNIT_BYTES
            assert until(lambda: store.striped.stats().ahead_bytes >= least)
            found[len(own)] = store.striped.stats().ahead_bytes
        return forward(self, own, n, begin, done)

    monkeypatch.setattr(decoding.Decoding, "_forward", waiting)
    # drafts that are to take forever: the memory and the deadline alone bound what is read
    monkeypatch.setattr(Pace, "draft_s", property(lambda pace: 1e9 * pace.gamma))
    options: dict[str, Any] = {"draft_read_ahead_bytes": limit, "read_ahead_bytes": 4096}
    with reopened(folder, kind, **options) as cache:
        got = speculated("llama", asked, cache, gamma=4, **ends)
        said, (device,) = cache.stats(), cache.store.striped.devices
        assert isinstance(device, SsdRowDevice)
        stream = device._stream.stats()
        cache.store.ahead.resume()  # which now goes as far as always
        assert device._stream.stats()["ahead_bytes"] <= UNIT_BYTES
    assert torch.equal(got, wanted)
    assert len(found) > 1
    drafts, far = said["speculation"], limit > UNIT_BYTES
    assert drafts["read_ahead_limit_bytes"] == limit
    assert drafts["draft_bytes_asked"] == 0
    # and what each thread needs now, where the window is full of what others work on
    needed = torch.get_num_threads() * UNIT_BYTES
    assert stream["most_ahead_bytes"] <= max(limit, UNIT_BYTES) + needed
    assert max(found.values()) <= max(limit, UNIT_BYTES)
    assert (max(found.values()) > UNIT_BYTES) is far
    assert (drafts["read_ahead_bytes"] > UNIT_BYTES) >= far


@pytest.mark.usefixtures("without_lookup")
@pytest.mark.parametrize("fault", ["error", "flip"])
def test_a_read_ahead_of_a_draft_fails(folder: Path, fault: str) -> None:
    """The pass that wants it says so; its tokens are gone, those before stand, and the cache goes
    on."""
    inputs, made = prompt([400]), list[FaultyEngine]()
    wanted = one_by_one("llama", inputs, max_new_tokens=30)

    def make_engine() -> FaultyEngine:
        # the third time that the rows of two layers are read
        rule = FaultRule(fault, operation="read", nth=6, count=1, value=errno.EIO)  # type: ignore[arg-type]
        made.append(FaultyEngine([rule], poison=True, pool_bytes=1 << 20))
        return made[-1]

    options: dict[str, Any] = {"engine": make_engine, "spill_interval": 400, "draft": "pages"}
    options |= {"read_ahead_bytes": 4096, "draft_read_ahead_bytes": 1 << 30}
    with KVCache(enabled("llama").config, folder, **options) as cache:
        with pytest.raises((errors.ReadError, errors.ChecksumError)) as caught:
            speculated("llama", inputs, cache, max_new_tokens=30, gamma=4)
        so_far = caught.value.sequences
        assert so_far.shape[1] > 400
        assert torch.equal(so_far, wanted[:, : so_far.shape[1]])
        more = {"input_ids": so_far, "attention_mask": torch.ones_like(so_far)}
        n = 430 - so_far.shape[1]
        assert torch.equal(speculated("llama", more, cache, max_new_tokens=n), wanted)
    for engine in made:
        engine.close()


def test_rows_of_a_narrower_format_are_rounded_when_they_come(folder: Path) -> None:
    """Logits do not depend on when rows are written."""
    ids, found = prompt([70])["input_ids"], []
    for interval in (8, 64, 999):
        options: dict[str, Any] = {"format": "bf16", "spill_interval": interval}
        with KVCache(enabled("llama").config, folder, **options) as cache, torch.no_grad():
            for begin in range(0, 70, 7):
                out = enabled("llama")(ids[:, begin : begin + 7], past_key_values=cache)
            rows = cache.store.rows.kv[0]
            assert rows is not None
            assert rows.dtype == torch.bfloat16
            found.append(out.logits)
    for each in found[1:]:  # to rounding; a value between two of bf16 may become either
        off = (each - found[0]).abs()
        assert float(off.median()) < 1e-5
        assert float(off.max()) < 1e-2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["lookup", "pages"])
@pytest.mark.parametrize(
    ("held", "new", "gamma"), [(0, 64, 8), (64, 5, 8), (64, 20, None), (0, 64, 19)]
)
def test_no_byte_is_read_twice(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, held: int, new: int, gamma: int | None
) -> None:
    """What is put in line before a pass is what the pass asks for: behind a prompt whose sequences
    attend one at a time, behind a few tokens, and with passes of any length."""
    asked = kept(folder, [held] * 6, new) if held else prompt([new] * 6)
    wanted = one_by_one("llama", asked, max_new_tokens=40)
    drafting(monkeypatch, wanted, right=0.7)
    # the queries of two sequences of 17 tokens, of six of 5
    shape = enabled("llama").config
    each = 4 * shape.num_attention_heads * shape.head_dim
    monkeypatch.setattr(attention, "_PART_BYTES", 34 * each)
    step, passes = decoding.Decoding._step, 0

    def watched(self: Any) -> None:
        nonlocal passes
        step(self)
        striped = self._cache.store.striped

        def rest() -> int:
            """Bytes that were read for nobody."""
            said = striped.stats()
            read = striped.devices[0].engine.stats().bytes_asked - said.bytes_written
            return int(read) - said.bytes_asked - said.ahead_bytes

        if not self._ended:  # with a sequence that has ended all that was read is gone
            passes += 1
            assert until(lambda: rest() == 0, 5.0), f"{rest()} bytes, pass {passes}"

    monkeypatch.setattr(decoding.Decoding, "_step", watched)
    options: dict[str, Any] = {"name": "talk", "x_rows": 0, "spill_interval": 64}
    with KVCache(enabled("llama").config, folder, draft=kind, **options) as cache:
        got = speculated("llama", asked, cache, max_new_tokens=40, gamma=gamma)
    assert torch.equal(got, wanted)
    assert passes > 1


@pytest.mark.usefixtures("without_lookup")
@pytest.mark.parametrize("kind", KINDS)
def test_memory_of_reads_stays_where_a_pass_has_no_draft(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    asked = kept(folder, [400], 1)
    wanted, reached = one_by_one("llama", asked, max_new_tokens=30), list[int]()
    turn, limit = cycle([4, 0, 0, 2]), 2 << 20
    reach = StripedDevices.reach

    def watched(self: StripedDevices, size_bytes: int) -> None:
        reached.append(size_bytes)
        reach(self, size_bytes)

    monkeypatch.setattr(StripedDevices, "reach", watched)
    monkeypatch.setattr(Pace, "choose", lambda pace, *_: setattr(pace, "gamma", next(turn)))
    monkeypatch.setattr(Pace, "goes_on", lambda pace, done: done < pace.gamma)
    monkeypatch.setattr(Pace, "draft_s", property(lambda pace: 1e9 * pace.gamma))
    with reopened(folder, kind, draft_read_ahead_bytes=limit) as cache:
        got = speculated("llama", asked, cache, max_new_tokens=30, gamma=None)
        said = cache.stats()["speculation"]
        during = reached[reached.index(limit) :]
    assert torch.equal(got, wanted)
    assert [each["gamma"] for each in said["decisions"]].count(0) > 3
    # and nothing of it is left in the end
    assert set(during[: said["passes"]]) == {limit}
    assert set(during[said["passes"] :]) == {0}


@pytest.mark.parametrize("draft", [None, "lookup", "pages", "4bit"])
@pytest.mark.parametrize("n_new", [5, 25])
def test_only_what_is_new_is_given_with_a_mask_of_all(
    folder: Path, draft: str | None, n_new: int
) -> None:
    """More new tokens than the cache holds, or fewer; transformers leaves out a mask of ones."""
    held, new = prompt([20])["input_ids"], prompt([n_new], seed=4)["input_ids"]
    model, mask = enabled("llama"), torch.ones(1, 20 + n_new, dtype=torch.long)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12}
    both = {"input_ids": torch.cat([held, new], dim=1), "attention_mask": mask}
    whole = generate(model, both, None, **options)
    with torch.no_grad(), KVCache(model.config, folder, spill_interval=8, draft=draft) as cache:
        model(held, past_key_values=cache)
        custom = {} if draft is None else {"custom_generate": espnx.generate}
        found = model.generate(
            input_ids=new, attention_mask=mask, past_key_values=cache, **options, **custom
        )
        assert cache.get_seq_length() in (20 + n_new + 11, 20 + n_new + 12)
    assert torch.equal(found[0, n_new:], whole[0, 20 + n_new :])
