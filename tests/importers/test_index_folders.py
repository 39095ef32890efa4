"""Readers of index folders that colbert-ai, fast-plaid and PyLate wrote: the same vectors, and an
error for whatever is wrong with them."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from espnx.encoders.torch_files import load_torch
from espnx.errors import FormatError, InvalidInputError
from espnx.importers import plaid
from espnx.importers.collection import text_for, texts_of
from espnx.importers.convert import open_index
from espnx.importers.pylate_ids import IDS, read_ids
from espnx.ops.maxsim import token_format
from tests.encoders import tiny

safetensors = pytest.importorskip("safetensors.torch")

COLBERT = ["colbert-index-1", "colbert-index-2", "colbert-index-4"]
FAST = ["fast-plaid-index", "pylate-index"]
NBITS = {
    "colbert-index-1": 1,
    "colbert-index-2": 2,
    "colbert-index-4": 4,
    "fast-plaid-index": 4,
    "pylate-index": 2,
}


def held(name):
    return safetensors.load_file(tiny.DATA / f"{name}.safetensors")


def decoded(index):
    form = token_format(index.format)
    return [form.decode(rows.reshape(-1), index.dim, index.codebook) for rows in index.rows()]


def scores(queries, documents):
    return torch.stack([(q @ d.T).max(1).values.sum() for q in queries for d in documents]).view(
        len(queries), -1
    )


@pytest.mark.parametrize("name", NBITS)
def test_what_is_in_it(name):
    index = open_index(tiny.DATA / name)
    documents = list(index.rows())
    assert (index.codebook.nbits, index.dim, index.format) == (
        NBITS[name],
        32,
        f"residual{NBITS[name]}",
    )
    assert len(documents) == index.documents
    assert sum(map(len, documents)) == index.tokens
    assert {rows.shape[1] for rows in documents} == {4 + 32 * NBITS[name] // 8}


@pytest.mark.parametrize("name", COLBERT)
def test_colbert_vectors_and_scores(name):
    expected = held(name)
    documents = decoded(open_index(tiny.DATA / name))
    # Both add the same two float32 numbers and divide by the length: a rounding or two apart; 16
    # query tokens in the score.
    torch.testing.assert_close(torch.cat(documents[:3]), expected["tokens"], atol=2e-7, rtol=0)
    torch.testing.assert_close(
        scores(expected["queries"], documents), expected["scores"], atol=16 * 4e-7, rtol=0
    )


@pytest.mark.parametrize("name", FAST)
def test_fast_plaid_scores(name):
    expected = held(name)
    index = open_index(tiny.DATA / name)
    documents = decoded(index)
    number = {n: n for n in range(index.documents)}
    if name == "pylate-index":
        number = {
            int(key[4:]): n
            for n, key in enumerate(read_ids(tiny.DATA / name / IDS, index.documents))
        }
    mine = scores(expected["queries"], documents)
    for row, numbers, theirs in zip(
        mine, expected["numbers"].tolist(), expected["scores"], strict=True
    ):
        # fast-plaid decodes and sums three tokens in fp16: for each a few roundings of 2^-11, and
        # those of the sum, below 4, of 2^-10.
        torch.testing.assert_close(
            row[[number[n] for n in numbers]], theirs, atol=3 * 2**-10, rtol=0
        )
    # What was quantised is near what was indexed.
    found, original = torch.cat(documents[:3]), expected["tokens"]
    assert (found * original).sum(1).mean() > (0.99 if NBITS[name] == 4 else 0.95)


@pytest.mark.parametrize("name", NBITS)
def test_in_small_slices(name, monkeypatch):
    index = open_index(tiny.DATA / name)
    whole = list(index.rows())
    assert len(whole) > 1
    monkeypatch.setattr(plaid, "TOKENS_AT_ONCE", 10)
    assert all(torch.equal(a, b) for a, b in zip(index.rows(), whole, strict=True))


@pytest.mark.parametrize("name", NBITS)
def test_nothing_stays_mapped(name):
    count = 0
    for count, _ in enumerate(open_index(tiny.DATA / name).rows(), 1):  # noqa: B007 - counted
        # pages of a mapping count as the process's memory
        assert name not in Path("/proc/self/maps").read_text()
    assert count > 1


@pytest.fixture
def copy(tmp_path):
    return lambda name: shutil.copytree(tiny.DATA / name, tmp_path / name)


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut(path, keep=0.5):
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])


def config(folder, **changes):
    path = folder / "metadata.json"
    value = json.loads(path.read_text())
    value["config"] |= changes
    path.write_text(json.dumps(value))


def change(path, do):
    old = path.rename(path.with_suffix(".old"))  # what is loaded is mapped
    torch.save(do(load_torch(old)), path)


def drop(folder, field):
    path = folder / "metadata.json"
    value = json.loads(path.read_text())
    where = value["config"] if field in value["config"] else value
    del where[field]
    path.write_text(json.dumps(value))


COLBERT_DAMAGE = {
    "missing codes": (
        lambda f: (f / "1.codes.pt").unlink(),
        "chunk of the index is missing.*1.codes.pt",
    ),
    "missing residuals": (
        lambda f: (f / "1.residuals.pt").unlink(),
        "chunk of the index is missing.*1.residuals.pt",
    ),
    "missing lengths": (
        lambda f: (f / "doclens.2.json").unlink(),
        "chunk of the index is missing.*doclens.2.json",
    ),
    "missing chunk metadata": (
        lambda f: (f / "0.metadata.json").unlink(),
        "chunk of the index is missing.*0.metadata.json",
    ),
    "missing buckets": (
        lambda f: (f / "buckets.pt").unlink(),
        "buckets of the index.*no such file",
    ),
    "missing metadata": (
        lambda f: (f / "metadata.json").unlink(),
        "without metadata.json.*did not come to its end",
    ),
    "other nbits": (
        lambda f: config(f, nbits=4),
        r"cutoffs \[3\], weights \[4\]; expected \[15\] and \[16\]",
    ),
    "nbits of no codec": (lambda f: config(f, nbits=8), "8 bits; expected 1, 2 or 4"),
    "wrong dim": (
        lambda f: config(f, dim=64),
        r"centroids of the index.*\[256, 32\]; expected \[any, 64\]",
    ),
    "wrong dim everywhere": (
        lambda f: (config(f, dim=64), change(f / "centroids.pt", lambda t: torch.cat([t, t], 1))),
        (
            r"residuals beside the codes.*uint8 \[168, 8\]; expected uint8 \[tokens, 16\], as 2 "
            r"bits for d = 64 have"
        ),
    ),
    "no number of chunks": (
        lambda f: drop(f, "num_chunks"),
        "field num_chunks of the index's metadata.*None",
    ),
    "no dim": (lambda f: drop(f, "dim"), "field config.dim"),
    "text for a number": (
        lambda f: edit(f / "metadata.json", num_embeddings="436"),
        "field num_embeddings.*'436'",
    ),
    "config is a list": (lambda f: edit(f / "metadata.json", config=[]), "field config.dim"),
    "metadata is no object": (
        lambda f: (f / "metadata.json").write_text("[]"),
        "got list; expected an object",
    ),
    "truncated metadata": (lambda f: cut(f / "metadata.json"), "parse JSON"),
    "truncated codes": (
        lambda f: cut(f / "1.codes.pt"),
        "1.codes.pt; got no archive, or a cut one",
    ),
    "truncated centroids": (
        lambda f: cut(f / "centroids.pt", 0.9),
        "centroids.pt; got no archive, or a cut one",
    ),
    "empty residuals": (
        lambda f: (f / "0.residuals.pt").write_bytes(b""),
        "0.residuals.pt; got no archive",
    ),
    "codes too short": (
        lambda f: change(f / "1.codes.pt", lambda t: t[:-1].clone()),
        "got 181 codes and 182 residuals; expected 182",
    ),
    "residuals too long": (
        lambda f: change(f / "0.residuals.pt", lambda t: torch.cat([t, t])),
        "168 codes and 336 residuals",
    ),
    "codes of another centroid": (
        lambda f: change(f / "2.codes.pt", lambda t: t + 200),
        "codes of the index.*2.codes.pt.*expected 0 to 255",
    ),
    "negative codes": (lambda f: change(f / "2.codes.pt", lambda t: t - 256), "codes of the index"),
    "codes as floats": (
        lambda f: change(f / "0.codes.pt", lambda t: t.float()),
        "expected integers",
    ),
    "residuals as ints": (
        lambda f: change(f / "0.residuals.pt", lambda t: t.int()),
        "residuals beside the codes.*int32",
    ),
    "a dict of tensors": (
        lambda f: change(f / "0.codes.pt", lambda t: {"codes": t}),
        "got dict; expected a tensor",
    ),
    "lengths that do not match": (
        lambda f: (f / "doclens.1.json").write_text(
            json.dumps([1, *json.loads((f / "doclens.1.json").read_text())])
        ),
        "chunk of the index.*1.metadata.json.*'num_passages': 20.*'num_passages': 21",
    ),
    "lengths that are no list": (
        lambda f: (f / "doclens.0.json").write_text('{"a": 1}'),
        "lengths of documents",
    ),
    "a negative length": (
        lambda f: (f / "doclens.0.json").write_text("[-1, 169]"),
        "lengths of documents",
    ),
    "chunk of another place": (
        lambda f: edit(f / "1.metadata.json", passage_offset=21),
        "passage_offset",
    ),
    "a chunk too few": (
        lambda f: edit(f / "metadata.json", num_chunks=2),
        "tokens of the index.*got 350; expected 436",
    ),
    "a chunk too many": (lambda f: edit(f / "metadata.json", num_chunks=4), "doclens.3.json"),
    "centroids too few": (
        lambda f: edit(f / "metadata.json", num_partitions=128),
        "256 centroids; expected 128",
    ),
    "centroids with NaN": (
        lambda f: change(f / "centroids.pt", lambda t: t * float("nan")),
        "codebook of the index.*finite",
    ),
    "buckets in disorder": (
        lambda f: change(f / "buckets.pt", lambda b: (b[0].flip(0), b[1])),
        "codebook of the index.*ascending",
    ),
    "one bucket tensor": (
        lambda f: change(f / "buckets.pt", lambda b: b[0]),
        "buckets of the index.*got Tensor",
    ),
}


@pytest.mark.parametrize("damage", COLBERT_DAMAGE)
def test_damaged_colbert_index(copy, damage):
    do, says = COLBERT_DAMAGE[damage]
    folder = copy("colbert-index-2")
    do(folder)
    with pytest.raises(FormatError, match=f"(?s){says}") as raised:
        list(open_index(folder).rows())
    assert "colbert-index-2" in str(raised.value)


def as_array(path, do):
    np.save(path, do(np.load(path)))


FAST_DAMAGE = {
    "missing codes": (
        lambda f: (f / "merged_codes.npy").unlink(),
        "chunk of the index is missing.*0.codes.npy",
    ),
    "missing lengths": (lambda f: (f / "doclens.0.json").unlink(), "doclens.0.json"),
    "missing weights": (lambda f: (f / "bucket_weights.npy").unlink(), "bucket_weights.npy"),
    "missing metadata": (lambda f: (f / "metadata.json").unlink(), "without metadata.json"),
    "other nbits": (
        lambda f: edit(f / "metadata.json", nbits=2),
        r"expected \[3\] and \[4\] for 2 bits",
    ),
    "nbits of no codec": (lambda f: edit(f / "metadata.json", nbits=3), "3 bits"),
    "wrong dim": (
        lambda f: as_array(f / "centroids.npy", lambda a: a[:, :16]),
        r"residuals beside.*\[tokens, 8\], as 4 bits for d = 16",
    ),
    "flat centroids": (
        lambda f: as_array(f / "centroids.npy", lambda a: a.reshape(-1)),
        "centroids of the index",
    ),
    "truncated codes": (lambda f: cut(f / "merged_codes.npy"), "read an array.*merged_codes.npy"),
    "truncated head": (
        lambda f: (f / "centroids.npy").write_bytes(b"\x93NUMPY"),
        "read an array.*centroids.npy",
    ),
    "pickled array": (
        lambda f: np.save(f / "bucket_cutoffs.npy", np.array([{}], dtype=object)),
        "read an array.*bucket_cutoffs",
    ),
    "codes too few": (
        lambda f: as_array(f / "merged_codes.npy", lambda a: a[:300]),
        "300 codes and 335 residuals",
    ),
    "lengths that do not match": (
        lambda f: (f / "doclens.0.json").write_text("[300, 30]"),
        "335 codes.*expected 330",
    ),
    "manifest without rows": (
        lambda f: edit(f / "merged_codes.manifest.json", **{"0.codes.npy": {}}),
        "manifest of the index",
    ),
    "more documents": (
        lambda f: edit(f / "metadata.json", num_documents=41),
        "documents of the index.*got 40; expected 41",
    ),
    "more tokens": (
        lambda f: edit(f / "metadata.json", num_embeddings=336),
        "tokens of the index.*got 335; expected 336",
    ),
}


@pytest.mark.parametrize("damage", FAST_DAMAGE)
def test_damaged_fast_plaid_index(copy, damage):
    do, says = FAST_DAMAGE[damage]
    folder = copy("fast-plaid-index")
    do(folder)
    with pytest.raises(FormatError, match=f"(?s){says}") as raised:
        list(open_index(folder).rows())
    assert "fast-plaid-index" in str(raised.value)


def test_a_chunks_own_file_is_newer_than_the_merged_one(copy):
    folder = copy("pylate-index") / "fast_plaid_index"
    as_array(folder / "0.residuals.npy", lambda a: a ^ 255)
    changed = next(open_index(folder).rows())
    (folder / "0.residuals.npy").unlink()
    (folder / "0.codes.npy").unlink()
    merged = next(open_index(folder).rows())
    assert torch.equal(changed[:, 4:], ~merged[:, 4:])
    assert torch.equal(changed[:, :4], merged[:, :4])


def test_chunks_of_a_merged_file(copy):
    folder = copy("fast-plaid-index")
    whole = list(open_index(folder).rows())
    lengths = json.loads((folder / "doclens.0.json").read_text())
    for number, part in enumerate((lengths[:7], [], lengths[7:])):
        (folder / f"doclens.{number}.json").write_text(json.dumps(part))
    edit(folder / "metadata.json", num_chunks=3)
    for part in ("codes", "residuals"):
        rows = {
            f"{n}.{part}.npy": {"rows": count}
            for n, count in enumerate((sum(lengths[:7]), 0, sum(lengths[7:])))
        }
        (folder / f"merged_{part}.manifest.json").write_text(json.dumps(rows))
    assert all(torch.equal(a, b) for a, b in zip(open_index(folder).rows(), whole, strict=True))
    for part in ("codes", "residuals"):
        (folder / f"merged_{part}.manifest.json").unlink()  # the lengths say the same
    assert all(torch.equal(a, b) for a, b in zip(open_index(folder).rows(), whole, strict=True))


def test_half_precision_buckets_of_a_gpu_index(copy):
    folder = copy("colbert-index-2")
    change(folder / "buckets.pt", lambda b: (b[0], b[1].half()))
    index = open_index(folder)
    assert (
        index.codebook.bucket_weights.tolist()
        == load_torch(folder / "buckets.pt")[1].float().tolist()
    )


def test_documents_without_tokens(copy):
    folder = copy("colbert-index-2")
    lengths = [0, *json.loads((folder / "doclens.0.json").read_text()), 0]
    (folder / "doclens.0.json").write_text(json.dumps(lengths))
    for number, (offset, count) in enumerate(((0, 22), (22, 20), (42, 10))):
        edit(folder / f"{number}.metadata.json", passage_offset=offset, num_passages=count)
    documents = list(open_index(folder).rows())
    assert [len(documents[0]), len(documents[21])] == [0, 0]
    assert documents[0].shape == (0, 12)
    assert len(documents) == 52


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (None, "no such directory"),
        ([], "an empty directory"),
        (["0.codes.pt", "metadata.json"], "got 0.codes.pt, metadata.json; expected centroids.pt"),
        ([f"{n}" for n in range(9)], r"0, 1, 2, 3, 4, 5, \.\.\."),
    ],
)
def test_not_an_index(tmp_path, made, says):
    folder = tmp_path / "x"
    if made is not None:
        folder.mkdir()
        for name in made:
            (folder / name).touch()
    with pytest.raises(InvalidInputError, match=says):
        open_index(folder)


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_pickles_are_not_run(copy, tmp_path):
    folder = copy("colbert-index-2")
    torch.save(Bomb(tmp_path / "ran"), folder / "centroids.pt")
    with pytest.raises(FormatError, match=r"Unsupported global|not an allowed"):
        open_index(folder)
    assert not (tmp_path / "ran").exists()


def pickled(value, protocol):
    file = io.BytesIO()
    torch.serialization.pickle.dump(value, file, protocol=protocol)
    return file.getvalue()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_ids(tmp_path, protocol):
    path = tmp_path / "ids"
    ids = ["a", "b" * 300, "\u00e4\u4e2d", 7, -(2**40), 70_000, "a", 2**70] + [
        f"doc {n}" for n in range(2000)
    ]
    path.write_bytes(pickled(dict(enumerate(ids)), protocol))
    assert read_ids(path, len(ids)) == ids


def test_ids_out_of_order(tmp_path):
    path = tmp_path / "ids"
    path.write_bytes(pickled({1: "b", 0: "a"}, 4))
    assert read_ids(path, 2) == ["a", "b"]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({0: "a"}, "1 ids; expected one for each of 2"),
        ({0: "a", 2: "b"}, "2 ids"),
        ({0: "a", 1: 1.5}, "the pickle wants BINFLOAT"),
        ({0: "a", 1: ("b",)}, "the pickle wants TUPLE1"),
        ({0: "a", 1: True}, "the pickle wants NEWTRUE"),
        ({0: "a", 1: {}}, r"got \{\}; expected ids"),
        (["a", "b"], "the pickle wants EMPTY_LIST"),
        (Bomb(Path("never")), "the pickle wants"),
        ("a", "1 objects"),
    ],
)
def test_ids_that_are_not(tmp_path, value, says):
    path = tmp_path / "ids"
    path.write_bytes(pickled(value, 4))
    with pytest.raises(FormatError, match=says):
        read_ids(path, 2)


def test_ids_cut_short(tmp_path):
    data = pickled({0: "a", 1: "b"}, 4)
    for keep in range(len(data)):
        (tmp_path / "ids").write_bytes(data[:keep])
        with pytest.raises(FormatError):
            read_ids(tmp_path / "ids", 2)


def write(path, text):
    path.write_text(text, encoding="utf-8", newline="")
    return path


def test_texts(tmp_path):
    tsv = write(tmp_path / "c.tsv", "0\tone\r\n1\ttwo\ttitle\n\n2\t\n")
    assert list(texts_of(tsv, 3)) == [(None, "one"), (None, "title | two"), (None, "")]
    lines = write(
        tmp_path / "c.jsonl",
        '{"_id": "x", "text": "one", "title": "t"}\n{"id": 5, "text": "tw\u00f6"}\n{"text": ""}\n',
    )
    assert list(texts_of(str(lines), 3)) == [("x", "t one"), (5, "tw\u00f6"), (None, "")]
    assert list(texts_of(None, 2)) == [(None, ""), (None, "")]
    assert list(texts_of({1: "a"}, 1)) == [(None, "")]
    assert text_for({1: "a"}, 1, "") == "a"
    assert text_for(None, 1, "line") == "line"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("c.tsv", "0\ta\n", "got 1 lines; expected 2"),
        ("c.tsv", "0\ta\n1\tb\n2\tc\n", "more than 2 lines"),
        ("c.tsv", "0\ta\n2\tb\n", "line 2.*expected 1, a tab"),
        ("c.tsv", "0\ta\n1\n", "line 2"),
        ("c.jsonl", '{"text": "a"}\nx\n', "line 2.*a JSON object"),
        ("c.jsonl", '{"text": "a"}\n{"text": 1}\n', "line 2.*with a text"),
        ("c.jsonl", '"a"\n"b"\n', "line 1.*with a text"),
    ],
)
def test_texts_that_are_not(tmp_path, name, text, says):
    with pytest.raises(InvalidInputError, match=f"(?s){says}"):
        list(texts_of(write(tmp_path / name, text), 2))


def test_texts_unreadable(tmp_path):
    with pytest.raises(InvalidInputError, match="cannot read texts"):
        list(texts_of(tmp_path / "none.tsv", 1))
    (tmp_path / "latin.tsv").write_bytes(b"0\t\xe4\n")
    with pytest.raises(InvalidInputError, match="UTF-8"):
        list(texts_of(tmp_path / "latin.tsv", 1))
    with pytest.raises(InvalidInputError, match=r"'b'.*no such key"):
        text_for({"a": "x"}, "b", "")
