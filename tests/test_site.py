"""The documentation as a site: every page has its place in the navigation, links that lead out of
docs/ get pages, what the API pages name exists. Building it whole is `make docs`."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SETTINGS = ROOT / "mkdocs.yml"


def site() -> Any:
    """scripts/docs_site.py."""
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "scripts/docs_site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pages_of(nav: Any) -> list[str]:
    """Files of a navigation, in its order."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in pages_of(part)]


def test_every_page_has_one_place_in_the_navigation() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    found = pages_of(yaml.safe_load(SETTINGS.read_text())["nav"])
    assert sorted(found) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def test_what_the_api_pages_name_exists() -> None:
    named = re.findall(
        r"^::: (\S+)$",
        "\n".join(path.read_text() for path in (DOCS / "api").glob("*.md")),
        re.MULTILINE,
    )
    assert "espnx.retrieval.search.index.Index" in named
    for name in named:
        module, _, member = name.rpartition(".")
        if importlib.util.find_spec(module) is not None and hasattr(
            importlib.import_module(module), member
        ):
            continue
        assert importlib.util.find_spec(name) is not None, name
    missing = public_names() - {name.rpartition(".")[2] for name in named} - module_members(named)
    assert not missing, "names of `espnx` that no API page shows"


def public_names() -> set[str]:
    import espnx

    return set(espnx.__all__) - {"__version__", "device", "errors", "open"}


def module_members(named: list[str]) -> set[str]:
    """What the modules among the names define in public."""
    found = set()
    for name in named:
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            spec = None
        if spec is not None:
            found |= {
                member
                for member in vars(importlib.import_module(name))
                if not member.startswith("_")
            }
    return found


def test_links_out_of_the_documents_get_pages() -> None:
    pages = site().outside_pages()
    assert {
        "source/examples.md",
        "source/examples/tour.ipynb.md",
        "source/espnx/device/interface.py.md",
    } <= set(pages)
    assert pages["source/espnx/device/interface.py.md"].startswith(
        "# espnx/device/interface.py\n\n```python\n"
    )
    assert "```python\nimport tempfile\n" in pages["source/examples/tour.ipynb.md"]
    every = set(pages) | {
        path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*") if path.is_file()
    }
    for name, text in pages.items():
        # pages that show a file as it is have no links
        if not name.endswith((".py.md", ".json.md", ".sh.md")):
            for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
                assert target.startswith("http") or relative(name, target) in every, (
                    f"{name}: {target}"
                )


def relative(page: str, target: str) -> str:
    parts: list[str] = []
    for part in [*page.split("/")[:-1], *target.split("/")]:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return "/".join(parts)


@pytest.mark.parametrize(
    ("text", "place", "page", "expected"),
    [
        ("[a](../examples/01_search.py)", "docs", "a.md", "[a](source/examples/01_search.py.md)"),
        (
            "[a](../../examples/01_search.py#x)",
            "docs/measured",
            "measured/a.md",
            "[a](../source/examples/01_search.py.md#x)",
        ),
        ("[a](docs/search.md#x)", ".", "source/CONTRIBUTING.md.md", "[a](../search.md#x)"),
        (
            "[a](search.md) [b](#c) [d](https://x.y/z)",
            "docs",
            "a.md",
            "[a](search.md) [b](#c) [d](https://x.y/z)",
        ),
        ("[a](../nowhere.py)", "docs", "a.md", "[a](../nowhere.py)"),
    ],
)
def test_links_are_rewritten(text: str, place: str, page: str, expected: str) -> None:
    assert site().rewritten(text, ROOT / place, page) == expected


@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    if (
        importlib.util.find_spec("mkdocs") is None
        or importlib.util.find_spec("mkdocstrings") is None
    ):
        pytest.skip("mkdocs and mkdocstrings are not installed (`make docs` installs them)")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(SETTINGS),
        "--site-dir",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "index.html").is_file()
    found = {
        entry["location"]
        for entry in json.loads((tmp_path / "search/search_index.json").read_text())["docs"]
    }
    assert any("search.html" in place for place in found)
    assert not [place for place in found if ".json.html" in place], (
        "whole result files stand among what a search finds"
    )
