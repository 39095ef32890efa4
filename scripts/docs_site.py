"""What `make docs` does beside MkDocs: links that lead out of docs/, to sources and examples, get
pages of their own.

On GitHub such links open the file; on the site they open a page that shows it. A folder's page
lists what is in it.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SHOWN = "source"  # the folder of such pages on the site
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
LANGUAGES = {
    ".py": "python",
    ".sh": "bash",
    ".json": "json",
    ".toml": "toml",
    ".cpp": "cpp",
    ".hpp": "cpp",
}


def target_of(link: str, place: Path) -> Path | None:
    """The file or folder of this tree, outside of docs/, that a link of a page in the folder
    `place` leads to; None for any other."""
    if "://" in link or link.startswith(("/", "mailto:")):
        return None
    path = Path(os.path.normpath(place / link))
    return (
        path
        if path.exists() and path.is_relative_to(ROOT) and not path.is_relative_to(DOCS)
        else None
    )


def page_of(path: Path) -> str:
    """The site's page of a file or folder of this tree: ``source/examples/01_search.py.md``."""
    return f"{SHOWN}/{path.relative_to(ROOT).as_posix()}.md"


def rewritten(markdown: str, place: Path, page: str) -> str:
    """The text with its links out of docs/ leading to the pages of their targets.

    Args:
        place: the folder that the text lies in.
        page: its own page on the site, from which links begin.
    """

    def follow(match: re.Match[str]) -> str:
        found = target_of(match[2], place)
        if found is not None:
            return match[1] + os.path.relpath(page_of(found), PurePosixPath(page).parent) + match[3]
        inside = Path(os.path.normpath(place / match[2]))
        if "://" in match[2] or not inside.is_relative_to(DOCS):
            return match[0]
        return (
            match[1]
            + os.path.relpath(inside.relative_to(DOCS), PurePosixPath(page).parent)
            + match[3]
        )

    return LINK.sub(follow, markdown)


def shown(path: Path) -> str:
    """A file of this tree, or what is in a folder, as a page."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        files = sorted(entry for entry in path.iterdir() if not entry.name.startswith((".", "__")))
        return "\n".join(
            [f"# {name}/", "", *(f"- [{entry.name}]({entry.name})" for entry in files)]
        )
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    if path.suffix == ".ipynb":
        return "\n\n".join(_cell(cell) for cell in json.loads(text)["cells"])
    return f"# {name}\n\n```{LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n```"


def _cell(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    printed = "".join("".join(output.get("text", [])) for output in cell.get("outputs", []))
    return f"```python\n{source}\n```" + (
        f"\n\n```text\n{printed.rstrip()}\n```" if printed else ""
    )


def outside_pages() -> dict[str, str]:
    """Every page for what the documents link to, and for what those link to in turn: its name on
    the site, and its text."""
    waiting = [(path.read_text(encoding="utf-8"), path.parent) for path in DOCS.rglob("*.md")]
    pages: dict[str, str] = {}
    while waiting:
        text, place = waiting.pop()
        for link in LINK.findall(text):
            found = target_of(link[1], place)
            if found is None or page_of(found) in pages:
                continue
            page = shown(found)
            folder = found if found.is_dir() else found.parent
            if found.is_dir() or found.suffix in (".md", ".ipynb"):
                waiting.append((page, folder))
                page = rewritten(page, folder, page_of(found))
            pages[page_of(found)] = page
    return pages


def on_files(files: Any, config: Any) -> Any:
    """MkDocs: the pages of this tree's other files join those of docs/."""
    from mkdocs.structure.files import File, InclusionLevel

    for name, text in outside_pages().items():
        # results: thousands of lines, in which a search would find every word
        if name.endswith(".json.md"):
            text = f"---\nsearch:\n  exclude: true\n---\n\n{text}"
        files.append(
            File.generated(config, name, content=text, inclusion=InclusionLevel.NOT_IN_NAV)
        )
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """MkDocs: links of a page of docs/ that lead out of it lead to those pages."""
    path = page.file.abs_src_path
    return rewritten(markdown, Path(path).parent, page.file.src_uri) if path else markdown
