"""Each kind of source gives the same documents, in pieces, and says in one line what is wrong with it."""

import json
import sys

import pytest

from innerloop.data import documents
from innerloop.data import sources as module

TEXTS = ["First ü.\n", "Second\nlines.", "", "Third 漢字"]


def read(place, column="text"):
    return ["".join(pieces) for pieces in documents(str(place), column)]


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 3)


def write_records(path, column="text"):
    path.write_text("".join(json.dumps({"id": n, column: x}) + "\n" for n, x in enumerate(TEXTS)) + "\n", "utf-8")
    return path


def write_parquet(path, column="text"):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"id": range(len(TEXTS)), column: TEXTS}), path)
    return path


def test_a_file_is_one_document_read_in_blocks(tmp_path, small_blocks):
    path = tmp_path / "book.txt"
    text = "\ufeffany é漢🌀\r\n" * 9
    path.write_bytes(text.encode())
    (pieces,) = ([*document] for document in documents(str(path)))
    assert "".join(pieces) == text[1:]  # the mark in front is none of it
    assert len(pieces) > 9


def test_a_folder_is_its_files_in_the_order_of_their_paths(tmp_path):
    (tmp_path / "b.txt").write_text("B")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.md").write_text("A")
    (tmp_path / "c.jsonl").write_text('{"text": "C1"}\n{"text": "C2"}')
    (tmp_path / "picture.png").write_bytes(b"\xff\x00")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "d.txt").write_text("D")
    assert read(tmp_path) == ["A", "B", "C1", "C2"]


def test_rows_are_documents(tmp_path, small_blocks):
    assert read(write_records(tmp_path / "x.jsonl")) == TEXTS
    assert read(write_records(tmp_path / "y.jsonl", "body"), "body") == TEXTS


def test_rows_of_parquet_are_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_ROWS", 3)
    assert read(write_parquet(tmp_path / "x.parquet")) == TEXTS
    assert read(write_parquet(tmp_path / "y.parquet", "body"), "body") == TEXTS


def test_a_data_set_is_read_from_the_hub_and_from_a_folder(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    write_records(tmp_path / "x.jsonl")
    given = datasets.Dataset.from_dict({"text": TEXTS})
    given.save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved") == TEXTS
    datasets.DatasetDict({"train": given}).save_to_disk(tmp_path / "several")
    assert read(tmp_path / "several") == TEXTS
    (tmp_path / "hub").mkdir()
    write_records(tmp_path / "hub" / "train.jsonl")
    assert read(f"hf:{tmp_path / 'hub'}") == TEXTS
    with pytest.raises(ValueError, match="must be a data set that can be loaded; got") as caught:
        read(f"hf:{tmp_path / 'nowhere'}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("x.txt", b"abc\xff\xfe", "byte 3 is not (invalid start byte). Is it a binary file?"),
        ("x.txt", b"abcd\xc3", "byte 4 is not (unexpected end of data)"),
        ("x.txt", b"ab\0c", "it holds a zero byte. Is it a binary file?"),
        ("x.jsonl", b'{"text": "a"}\nnot json\n', "line 2 must be a JSON object"),
        ("x.jsonl", b'\n["a"]', "line 2 must be a JSON object; got list"),
        ("x.jsonl", b'{"body": "a"}', "must have a column text; it has body. Name one by --column"),
        ("x.jsonl", b'{"text": 3}', "must hold text in its column text; got int"),
        ("x.parquet", b"PAR1 and no more", "must be a parquet file"),
    ],
)  # fmt: skip
def test_what_is_no_text_is_said_in_one_line(name, content, wanted, tmp_path, small_blocks):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read(tmp_path / name)
    assert wanted in str(caught.value) and name in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_column_of_parquet_is_said(tmp_path):
    path = write_parquet(tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="must have a column body; it has id, text"):
        read(path, "body")


def test_a_place_that_is_missing_or_holds_no_text_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"there is no .*nowhere"):
        read(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds none"):
        read(tmp_path)


@pytest.mark.parametrize(("place", "package"), [("x.parquet", "pyarrow"), ("hf:wikitext", "datasets")])
def test_a_missing_package_names_the_extra(place, package, tmp_path, monkeypatch):
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    for name in [*sys.modules]:
        if name.partition(".")[0] == package:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RuntimeError, match=rf"needs the package {package}.*innerloop\[data\]"):
        read(place if place.startswith("hf:") else tmp_path / place)


def test_the_mark_in_front_of_a_file_is_no_part_of_its_text(tmp_path):
    (tmp_path / "a.txt").write_text("\ufeffone\ufeff", "utf-8")
    (tmp_path / "b.jsonl").write_text('\ufeff{"text": "two"}\n{"text": "three"}\n', "utf-8")
    assert ["".join(pieces) for pieces in documents(str(tmp_path))] == ["one\ufeff", "two", "three"]
