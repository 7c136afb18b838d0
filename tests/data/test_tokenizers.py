"""Every text comes back as it was, whole or as it comes, and through the file."""

import json
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from innerloop.data import SEPARATOR, ByteTokenizer, PairTokenizer, cut, load_tokenizer, pydoc_topics
from innerloop.data.tokenizer import RESERVED

TEXT = pydoc_topics()[:40_000] + " déjà vu — 漢字 漢字かな 🌀🌀 \u0301\n\n\n  indented\r\n\ttab  "
PAIRS = PairTokenizer.learn([TEXT], 600)
BOTH = [ByteTokenizer(), PAIRS]
ODD = st.text(st.sampled_from("ab1 \n\t'sé漢🌀.-_\u00a0\u0301<>eos"), max_size=200)


@pytest.fixture(params=BOTH, ids=["bytes", "pairs"])
def tokenizer(request):
    return request.param


@settings(max_examples=60, deadline=None)
@given(text=st.one_of(st.text(max_size=80), ODD))
def test_every_text_comes_back(text):
    for tokenizer in BOTH:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert int(tokenizer.byte_counts[ids].sum()) == len(text.encode())
        assert int(tokenizer.character_counts[ids].sum()) == len(text)


def told(ids, given_):
    for token in ids:
        given_.append(token)
        yield token


@settings(max_examples=60, deadline=None)
@given(text=ODD)
def test_a_stream_gives_whole_characters_as_soon_as_they_are_there(text):
    for tokenizer in BOTH:
        ids = tokenizer.encode(text).tolist()
        pieces, given_ = [], []
        for piece in tokenizer.decode_stream(told(ids, given_)):
            pieces.append(piece)
            assert tokenizer.decode(given_) == "".join(pieces)
        assert "".join(pieces) == text
        assert all(pieces)


def test_bytes_that_are_no_character_are_replaced_in_a_stream_too(tokenizer):
    broken = [tokenizer.pieces.index(bytes([byte])) for byte in (0xF0, 0x9F, 0x41, 0xE6)]
    assert "".join(tokenizer.decode_stream(broken)) == tokenizer.decode(broken) == "\ufffdA\ufffd"


def test_a_reserved_name_in_a_text_is_text(tokenizer):
    text = "a<eos>b<pad>"
    ids = tokenizer.encode(text)
    assert int(ids.min()) >= len(RESERVED)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, SEPARATOR]) == text


def test_every_byte_has_an_id(tokenizer):
    assert {bytes([byte]) for byte in range(256)} <= set(tokenizer.pieces)
    assert len(tokenizer.pieces) == len(tokenizer)
    assert tokenizer.pieces[: len(RESERVED)] == [b"", b"", b""]


def test_a_file_gives_the_same_tokenizer(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert type(loaded) is type(tokenizer)
    assert loaded.as_json() == tokenizer.as_json()
    for text in (TEXT, "<eos> " + TEXT):
        assert loaded.encode(text).equal(tokenizer.encode(text))


def test_the_file_is_one_that_hugging_face_reads(tokenizer):
    import tokenizers

    theirs = tokenizers.Tokenizer.from_str(tokenizer.as_json())
    ids = tokenizer.encode(TEXT).tolist()
    assert theirs.encode(TEXT).ids == ids
    assert theirs.decode(ids) == TEXT
    assert [theirs.token_to_id(name) for name in RESERVED] == [0, 1, 2]


@settings(max_examples=200, deadline=None)
@given(text=ODD, piece=st.integers(1, 40), block=st.integers(1, 50))
@example(text=" " * 8 + "b", piece=2, block=7)
@example(text="\n\n    b", piece=2, block=3)
def test_pieces_are_encoded_as_the_whole(text, piece, block):
    text = "word " + text
    pieces = list(cut((text[i : i + block] for i in range(0, len(text), block)), piece))
    assert "".join(pieces) == text
    assert all(pieces)
    if all(len(x) < 16 * piece for x in pieces[:-1]):
        assert [int(x) for piece in pieces for x in PAIRS.encode(piece)] == PAIRS.encode(text).tolist()


def test_a_word_without_end_is_cut_all_the_same():
    pieces = list(cut(["漢"] * 1000, 10))
    assert "".join(pieces) == "漢" * 1000
    assert max(map(len, pieces)) == 160


def test_a_vocabulary_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="vocabulary must be what the text can fill; wanted 900, got"):
        PairTokenizer.learn(["short"], 900)
    with pytest.raises(ValueError, match="vocabulary must be at least 259"):
        PairTokenizer.learn([TEXT], 100)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"model": 3}', '{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "\xff",
     '{"model": {"type": "WordPiece", "vocab": {"<pad>": 0, "<bos>": 1, "<eos>": 2}, "merges": []}}'],
)  # fmt: skip
def test_another_file_is_refused_in_one_line(content, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(content, "latin-1")
    with pytest.raises(ValueError, match="must be a tokenizer") as caught:
        load_tokenizer(path)
    assert "\n" not in str(caught.value)


def test_a_file_whose_merges_are_damaged_is_refused(tmp_path):
    stored = json.loads(PAIRS.as_json())
    stored["model"]["merges"] = [["no", "such"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="cannot be read"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_bytes_need_no_package(tmp_path):
    ByteTokenizer().save(tmp_path / "tokenizer.json")
    program = (
        "import sys; sys.modules['tokenizers'] = None\n"
        "from innerloop.data import load_tokenizer\n"
        f"t = load_tokenizer({str(tmp_path / 'tokenizer.json')!r}); print(t.decode(t.encode('né')))"
    )
    done = subprocess.run([sys.executable, "-X", "utf8", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "né\n", done.stderr
