"""How many bytes are read ahead while drafts are made: what the disk brings in that time, and no
more than may be in memory."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from espnx.kv.draft import reach
from espnx.kv.draft.reach import Reach, free_memory_bytes

GB = 10**9


def test_nothing_before_a_pass_was_seen() -> None:
    assert Reach(GB).choose(1.0, 0, 30.0) == 0


def test_what_the_disk_brings_in_the_seconds_of_a_draft() -> None:
    """800 MB/s, of which 200 MB were there when the pass began."""
    it = Reach(100 * GB)
    it.note(1_000_000_000, 200_000_000, 1.0)
    chosen = it.choose(0.5, 0, 1e9)
    assert 400_000_000 <= chosen <= 600_000_000  # and some for drafts that go on for longer
    assert it.choose(0.25, 0, 1e9) == chosen  # the next draft may be as long again
    # drafts that take an hour: a read must not wait for its deadline behind others
    assert it.choose(3600.0, 0, 2.0) <= 800_000_000 * 2.0 / 2


def test_random_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "free_memory_bytes", lambda: 8 * GB)
    for seed in range(50):
        draw = random.Random(seed)
        asked = draw.choice([None, 0, 1, GB // 2, 100 * GB])
        it, rates, longest = Reach(asked), list[float](), 0.0
        for _ in range(20):
            rates.append(draw.uniform(1e8, 1e9))
            ahead, seconds = draw.randrange(GB), draw.uniform(0.01, 5.0)
            it.note(round(rates[-1] * seconds) + ahead, ahead, seconds)
            draft_s, tier = draw.uniform(0, 3), draw.choice([0, GB // 10, 50 * GB])
            longest = max(longest, draft_s)
            chosen = it.choose(draft_s, tier, 30.0)
            limit = min(tier, 2 * GB) if asked is None else asked
            assert it.limit_bytes == limit
            assert chosen == it.window_bytes <= limit
            # some pass of late
            assert chosen <= 1.5 * max(rates) * longest
            assert chosen >= min(limit, 0.99 * rates[-1] * draft_s, rates[-1] * 7)


def test_the_window_stays_where_a_pass_has_no_draft() -> None:
    """After many passes without one its memory is given back, and so it is with the text."""
    it = Reach(100 * GB)
    it.note(GB, 0, 1.0)
    wide = it.choose(1.0, 0, 1e9)
    assert wide >= GB
    for _ in range(31):
        it.note(GB // 2, 0, 1.0)  # the disk is slower for a while
        assert it.choose(0.0, 0, 1e9) == wide
    assert it.choose(0.0, 0, 1e9) == 0
    assert it.choose(0.5, 0, 1e9) > 0
    it.begin()
    assert it.choose(0.0, 0, 1e9) == 0


def test_what_stays_is_within_what_is_planned_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the rows for drafts that there are, and of the deadline at the rate of now."""
    monkeypatch.setattr(reach, "free_memory_bytes", lambda: 100 * GB)
    it = Reach()
    it.note(GB, 0, 1.0)
    assert it.choose(1.0, 8 * GB, 30.0) >= GB
    assert it.choose(0.0, GB // 4, 30.0) == GB // 4  # a sequence has lost its rows
    for _ in range(20):
        it.note(GB, 0, 1000.0)
        slow = it.choose(0.0, 8 * GB, 30.0)
    assert slow < GB * 0.9**20 * 30 * 0.26


def test_free_memory_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later it lacks what reads ahead have taken."""
    free = iter([4 * GB])
    monkeypatch.setattr(reach, "free_memory_bytes", lambda: next(free))
    it = Reach()
    it.note(GB, 0, 1.0)
    assert it.choose(60.0, 0, 30.0) == 0  # no pass has brought rows for drafts yet
    for tier, wanted in ((3 * GB, GB), (GB // 2, GB // 2), (3 * GB, GB)):
        it.choose(60.0, tier, 30.0)
        assert it.limit_bytes == wanted


def test_where_nothing_says_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "free_memory_bytes", lambda: None)
    it = Reach()
    it.note(GB, 0, 1.0)
    assert it.choose(60.0, GB // 3, 30.0) == GB // 3


@pytest.mark.parametrize(
    ("groups", "files", "wanted"),
    [
        ("", {}, 4 << 20),
        ("0::/\n", {}, 4 << 20),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/b/memory.current": "77\n"}, 4 << 20),
        ("0::/a/b\n", {"a/b/memory.max": "1000\n", "a/b/memory.current": "300\n"}, 700),
        # a limit of the group above
        (
            "0::/a/b\n",
            {
                "a/memory.max": "1000\n",
                "a/memory.current": "900\n",
                "a/b/memory.max": "1000\n",
                "a/b/memory.current": "300\n",
            },
            100,
        ),
        ("0::/a\n", {"a/memory.max": "1000\n", "a/memory.current": "1300\n"}, 0),
        (
            "5:cpu,cpuacct:/x\n7:memory:/jobs/one\n",
            {
                "memory/jobs/one/memory.limit_in_bytes": "5000\n",
                "memory/jobs/one/memory.usage_in_bytes": "1000\n",
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/memory.usage_in_bytes": "2000\n",
            },
            4000,
        ),
    ],
)
def test_free_memory(tmp_path: Path, groups: str, files: dict[str, str], wanted: int) -> None:
    written = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    4096 kB\n"}
    written |= {"proc/self/cgroup": groups}
    written |= {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in written.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert free_memory_bytes(tmp_path) == wanted


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    assert free_memory_bytes(tmp_path) is None
    found = free_memory_bytes()
    assert found is None or found > 0
