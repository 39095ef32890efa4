"""An index on the SSD: build it, search it, change it.

    python examples/01_search.py

The documents are the methods of Python's own types, by name. Needs `espnx[retrieval]` and the
encoder MiniLM (`make setup` brings both).
"""

from __future__ import annotations

import tempfile

import espnx


def documents() -> list[tuple[str, str]]:
    """(id, text): what is written about the methods of strings, lists and dicts."""
    methods = {
        f"{kind.__name__}.{name}": getattr(kind, name).__doc__
        for kind in (str, list, dict)
        for name in dir(kind)
    }
    return [
        (name, text)
        for name, text in methods.items()
        if text and not name.split(".")[-1].startswith("_")
    ]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/python.index"
        # a 1-bit record of each document beside the full one
        report = espnx.build(path, documents(), "minilm", coarse="bit1")
        print(
            f"{report.documents} documents, {report.record_bytes / 1e6:.1f} MB of token vectors on "
            "the SSD"
        )

        with espnx.open(path) as index:  # with the encoder that the store remembers
            result = index.search("split a string at line breaks", k=3)
            for hit in result:
                print(f"{hit.score:7.2f}  {hit.id}")
            print(
                f"{result.requests} requests, {result.bytes_moved} bytes by {result.effective_path}"
            )
            assert result[0].id == "str.splitlines"

            # Only among some documents; and with full records of the eight best alone, which is
            # faster and lossy.
            of_lists = [name for name, _ in documents() if name.startswith("list.")]
            assert (
                index.search("add an item at the end", k=1, include=of_lists)[0].id == "list.append"
            )
            assert (
                index.search("split a string at line breaks", k=3, cascade=8)[0].id
                == "str.splitlines"
            )

            # What is added or deleted is a new version of the store; an open index goes over to it
            # when it is told to.
            espnx.add(path, [("lines", "Splits a string at line breaks, and does nothing else.")])
            espnx.delete(path, ["str.splitlines"])
            assert "lines" not in index
            index.reload()
            best = index.search("split a string at line breaks", k=1)[0]
            print(f"{best.score:7.2f}  {best.id}: {best.text}")
            assert best.id == "lines"


if __name__ == "__main__":
    main()
