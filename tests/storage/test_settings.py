"""Engine settings in a file: they stand wherever an engine is named, and nothing in them is passed
over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from espnx import errors
from espnx.storage import EngineSettings, NativeEngine, native, open_engine
from espnx.storage.settings import load


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the compiled engine was told, call by call."""
    calls: list[dict[str, Any]] = []
    compiled = native.load_native()

    class Spy:
        @staticmethod
        def Engine(**options: Any) -> Any:  # noqa: N802
            calls.append(options)
            return compiled.Engine(**options)

    monkeypatch.setattr(native, "load_native", lambda: Spy)
    return calls


def test_the_file_then_the_default(tmp_path: Path, opened: list[dict[str, Any]]) -> None:
    """What is given wins over both."""
    file = tmp_path / "nvme.toml"
    settings = EngineSettings(path="posix", threads=3, request_bytes=8192)
    file.write_text(settings.text("measured\non a Sunday"))
    assert load(file) == settings
    assert file.read_text().startswith("# measured\n# on a Sunday\n[storage]\n")
    for path in (file, str(file)):
        with NativeEngine(path, threads=5) as engine:
            assert (engine.requested, engine.effective) == ("posix", "posix")
        with open_engine(path, pool_bytes=4096) as same:
            assert same.requested == "posix"
        told, also = opened[-2:]
        assert (told["path"], told["threads"], told["request_bytes"], told["queue_depth"]) == (
            "posix",
            5,
            8192,
            128,
        )
        assert (also["threads"], also["pool_bytes"]) == (3, 4096)


def test_wherever_an_engine_is_named(tmp_path: Path) -> None:
    from espnx.kv.cache import SsdCache
    from espnx.kv.options import CacheOptions
    from espnx.retrieval.search.index import Index
    from tests.retrieval.common import build, corpus

    file = tmp_path / "posix.toml"
    file.write_text(EngineSettings(path="posix", threads=2).text())
    build(tmp_path / "s", corpus(20))
    for engine in (str(file), file):
        with Index(tmp_path / "s", engine=engine) as index:
            assert index.store.effective_path.startswith("posix")
        cache = SsdCache(tmp_path / "kv", 1, CacheOptions(engine=engine, compute="cpu"))
        assert cache.striped.path_report()[0].effective_path.startswith("posix")
        cache.close()


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        (None, errors.InvalidInputError, "No such file .*bench io --path DIR --tune"),
        ("", errors.InvalidInputError, r"got nothing; expected a table \[storage\]"),
        ("path = 'uring'", errors.InvalidInputError, "got path; expected a table"),
        ("[storage]\n[other]", errors.InvalidInputError, "got storage, other"),
        (
            "[storage]\nquee_depth = 3",
            errors.InvalidInputError,
            "'quee_depth'.*did you mean queue_depth",
        ),
        (
            "[storage]\nqueue_depth = '3'",
            errors.InvalidInputError,
            r"queue_depth of engine settings .*x\.toml; got '3'",
        ),
        ("[storage]\nqueue_depth = true", errors.InvalidInputError, "got True"),
        ("[storage]\nqueue_depth = 0", errors.InvalidInputError, "queue_depth"),
        (
            "[storage]\npath = 'gds'",
            errors.InvalidInputError,
            "path of engine settings .*got 'gds'",
        ),
        ("[storage", errors.FormatError, r"x\.toml.*expected TOML"),
        ("# " + "x" * 70_000, errors.FormatError, "more than 65536 bytes"),
    ],
)
def test_files_that_are_no_settings(
    tmp_path: Path, text: str | None, kind: type[Exception], said: str
) -> None:
    file = tmp_path / "x.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(kind, match=said):
        open_engine(str(file))


def test_another_name_is_a_path_that_is_unknown() -> None:
    with pytest.raises(
        errors.InvalidInputError, match=r"unknown storage path; got 'nvme'.*or a file of settings"
    ):
        open_engine("nvme")
