"""The page: complete, escaped, and in need of nothing outside itself."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from innerloop.experiments.experiment import Experiment, Figure, Table
from innerloop.report.page import Entry, write_page
from innerloop.report.palette import DARK, LIGHT
from innerloop.report.record import Record
from innerloop.report.walk import Walk

NASTY = '<script>alert("x")</script> & <b>\'bold\'</b>'
TRACE = {
    "rule": "delta_rule", "tokens": ["a", "<b>", "a?"], "surprise": [[1.0, 2.0, 0.0]], "written": [[1.0, 1.0, 0.0]],
    "rank": [[1.0, 2.0, 2.0]], "returns": [[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.75, -0.25, 0.0]]],
    "half_life": [[None, 1, None]], "returned": [[0, 1, 0]], "gates": {"beta": [[1.0, 1.0, 0.0]]},
}  # fmt: skip
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Reader(HTMLParser):
    """Collects tags, text and identifiers; fails where tags do not close."""

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.text, self._open = [], "", []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += data


def straight(axes):
    axes.plot([0, 1])


def make(name="A1", *, words="plain", draw=straight, panels=1, **changes) -> Experiment:
    table = Table(f"Table {words}", ("what", f"ours {words}"), [(words, 0.123456), ("n", 3)], f"Note {words}")
    stated = {
        "title": f"Title {words}",
        "claim": f"Claim {words}",
        "source": f"Source {words}",
        "setting": f"Setting {words}",
        "band": f"Band {words}",
        "run": lambda settings: {},
        "check": lambda result: None,
        "tables": lambda result: [table],
        "figures": lambda result: [Figure(f"Figure {words}", f"Caption {words}", draw, panels)],
        "seconds": 1.0,
    }
    return Experiment(name=name, **(stated | changes))


def record(name="A1", **changes) -> Record:
    stated = {
        "key": "k", "verdict": "passed", "message": "", "traceback": "", "result": {"value": 1.0}, "seconds": 61.0,
        "quick": False, "data": "", "command": f"innerloop reproduce {name}", "finished": "2025-01-01T00:00:00+00:00",
        "torch": "2.13.0", "commit": "abc", "machine": {"cores": 2, "cpu": "CPU", "python": "3.11"},
    }  # fmt: skip
    return Record(name=name, **(stated | changes))


@pytest.fixture
def show(tmp_path):
    def show(*entries: Entry) -> str:
        return write_page(entries, tmp_path).path.read_text("utf-8")

    return show


def test_every_text_is_escaped(show):
    nasty = record(verdict="failed", message=NASTY, traceback=NASTY, command=NASTY, machine={"cpu": NASTY})

    def draw(axes):
        axes.plot([0, 1], label=NASTY)
        axes.set(title=NASTY, xlabel=NASTY)
        axes.legend()

    page = show(Entry(make(words=NASTY, draw=draw), nasty))
    reader = Reader(page)
    tags = [tag for tag, _ in reader.tags]
    assert tags.count("script") == 1, "only the page's own"
    assert "b" not in tags
    # Title (index and entry), claim, source, setting, band, message, trace, command, machine, and the texts
    # of table (4), figure (2) and SVG (3); the command stands in the index too.
    assert reader.text.count(NASTY) == 20


def test_it_needs_nothing_from_outside(show):
    page = show(Entry(make(panels=2, draw=lambda a, b: (a.plot([0, 1]), b.imshow([[0, 1], [1, 0]]))), record()))
    for tag, attributes in Reader(page).tags:
        assert tag not in {"link", "iframe", "object", "embed", "base"}
        for name in ("src", "href", "xlink:href", "srcset", "data", "action"):
            value = attributes.get(name) or "#"
            assert value == "learning-at-test-time.html" or value.startswith(("#", "data:image/png;base64,")), value
    assert "@import" not in page
    assert set(re.findall(r"url\(\s*['\"]?(.)", page)) <= {"#"}
    # What names an address at all is the name of a name space, which nobody fetches.
    assert set(re.findall(r"https?://[^\"'\s<]+", page)) == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "default-src 'none'" in page


def test_every_experiment_appears_also_those_that_have_not_run(show):
    page = show(
        Entry(make("A1", words="first"), record("A1")),
        Entry(make("A2", words="second"), record("A2", verdict="short", message="Shorter than stated.")),
        Entry(make("B1", words="third"), record("B1", verdict="failed", message="got 3", result=None)),
        Entry(make("C1", words="fourth"), None),
    )
    reader = Reader(page)
    articles = [attributes["id"] for tag, attributes in reader.tags if tag == "article"]
    assert articles == ["A1", "A2", "B1", "C1"]
    links = {attributes["href"] for tag, attributes in reader.tags if tag == "a"}
    pages = {"learning-at-test-time.html", "deltanet-memory-that-edits.html", "training-a-hope-block.html"}
    assert links == {"#A1", "#A2", "#B1", "#C1", *pages}
    words = " ".join(reader.text.split())
    for expected in ("✓ 1 pass", "◐ 1 short", "✗ 1 failed", "– 1 not run", "Shorter than stated.", "Claim fourth"):
        assert expected in words
    assert "got 3" in words
    for heading in ("Learning at test time", "DeltaNet: memory that edits", "Training a HOPE block"):
        assert heading in words


def test_numbers_are_shown_and_aligned_as_numbers(show):
    rows = [("1.25", 0.123456, 7, "a", True, "--"), ("< 3e-07", 1e-9, 12000, "1e-3", False, 2.0)]
    columns = ("text", "float", "int", "mixed", "truth", "gap")
    page = show(Entry(make(tables=lambda result: [Table("T", columns, rows)], figures=lambda result: []), record()))
    cells = re.findall(r'<td(?: class="(\w+)")?>([^<]*)</td>', page.partition("<main>")[2])
    assert [text for _, text in cells[:6]] == ["1.25", "0.1235", "7", "a", "yes", "–"]
    assert [text for _, text in cells[6:]] == ["&lt; 3e-07", "1e-09", "12000", "1e-3", "no", "2"]
    assert [kind for kind, _ in cells[:6]] == ["number", "number", "number", "", "", "number"]
    assert [kind for kind, _ in cells[6:]] == ["number", "number", "number", "whole", "", "number"]


def test_identifiers_are_unique_and_references_resolve(show):
    both = [make("A1", panels=2, draw=lambda a, b: (a.plot([0, 1]), b.plot([0, 1]))), make("A2")]
    reader = Reader(show(*(Entry(experiment, record(experiment.name)) for experiment in both)))
    names = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(names) == len(set(names))
    for _, attributes in reader.tags:
        for value in attributes.values():
            for target in re.findall(r"^#([\w.-]+)$|url\(#([\w.-]+)\)", value or ""):
                assert "".join(target) in names


def test_pictures_have_words_for_those_who_cannot_see_them(show):
    reader = Reader(show(Entry(make(panels=2, draw=lambda a, b: None), record())))
    labels = [attributes["aria-label"] for _, attributes in reader.tags if attributes.get("role") == "img"]
    assert labels == [f"Figure plain, panel {n} of 2: Caption plain" for n in (1, 2)]
    assert all(attributes.get("lang") == "en" for tag, attributes in reader.tags if tag == "html")


def test_colours_belong_to_the_page(show):
    def draw(axes):
        for i in range(6):
            axes.plot([0, i], color=f"C{i}", label=str(i))
        axes.axhline(0, color="k")
        axes.legend()

    page = show(Entry(make(draw=draw), record()))
    pictures = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert not re.search(r"#[0-9a-f]{6}\b", pictures)
    used = set(re.findall(r"var\(--(\w+)\)", pictures))
    assert used >= {"c0", "c1", "c2", "c3", "c4", "c5", "ink", "quiet", "grid", "paper"}
    assert used <= LIGHT.keys() == DARK.keys()


def test_every_picture_is_a_file_too_in_fixed_colours(show, tmp_path):
    pair = make("A1", panels=2, draw=lambda left, right: straight(left))
    show(Entry(pair, record("A1")), Entry(make("A2"), record("A2")))
    files = sorted((tmp_path / "figures").iterdir())
    assert [file.name for file in files] == ["A1-1-1.svg", "A1-1-2.svg", "A2-1.svg"]
    for file in files:
        text = file.read_text("utf-8")
        assert ElementTree.fromstring(text).tag.endswith("svg")
        assert "var(" not in text
        assert LIGHT["paper"] in text


def test_text_in_pictures_stays_text(show):
    page = show(Entry(make(draw=lambda axes: axes.set(title="A title to find", xlabel=r"$\beta$")), record()))
    assert re.search(r"<text[^>]*>A title to find</text>", page)
    assert "DejaVu" not in page


def test_a_grid_does_not_lie_over_a_heat_map(show, tmp_path):
    show(Entry(make(draw=lambda axes: axes.imshow([[0, 1], [1, 0]])), record()))
    assert LIGHT["grid"] not in (tmp_path / "figures" / "A1-1.svg").read_text("utf-8")


def test_the_same_result_gives_the_same_page(show):
    entry = Entry(make(), record())
    assert show(entry) == show(entry)


def test_a_result_that_cannot_be_drawn_is_shown_as_failed(tmp_path):
    def draw(axes):
        raise RuntimeError("no such line")

    page = write_page([Entry(make("A1", draw=draw), record("A1")), Entry(make("A2"), record("A2"))], tmp_path)
    assert page.broken == ["A1"]
    words = " ".join(Reader(page.path.read_text("utf-8")).text.split())
    assert "The result could not be shown: no such line" in words
    assert "✗ 1 failed" in words
    assert "✓ 1 pass" in words


def contrast(first: str, second: str) -> float:
    """Return the contrast ratio of two colours by the WCAG's formula."""

    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    bright, dim = sorted((luminance(first), luminance(second)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_lines_stand_out_from_the_paper(colours):
    for role in ("ink", "quiet", "link", "pass", "short", "fail", "c0", "c1", "c2", "c3", "c4", "c5"):
        assert contrast(colours[role], colours["paper"]) >= 4.5, role
    for role in ("ink", "quiet"):
        assert contrast(colours[role], colours["panel"]) >= 4.5, role


def test_every_document_has_a_page_of_its_own(tmp_path):
    write_page([Entry(make("A1", words="first"), record("A1")), Entry(make("B1", words="second"), None)], tmp_path)
    first = (tmp_path / "learning-at-test-time.html").read_text("utf-8")
    second = (tmp_path / "deltanet-memory-that-edits.html").read_text("utf-8")
    assert "Claim first" in first and "Claim second" not in first
    assert "Claim second" in second and "Claim first" not in second
    assert "index.html" in {attributes.get("href") for tag, attributes in Reader(first).tags if tag == "a"}
    assert "✓ 1 pass" in " ".join(Reader(first).text.split()) and "– 1 not run" in " ".join(Reader(second).text.split())


def test_the_index_gives_every_claim_its_command(show):
    page = show(Entry(make("A1"), record("A1", command="innerloop reproduce A1 --quick")), Entry(make("B2"), None))
    index = page.partition("<main>")[0]
    assert "<code>innerloop reproduce A1 --quick</code>" in index and "<code>innerloop reproduce B2</code>" in index


def test_a_walk_is_a_page_beside_it(tmp_path):
    walked = make("C4", walk=lambda result: Walk("One recall", TRACE))
    page = write_page([Entry(walked, record("C4"))], tmp_path).path.read_text("utf-8")
    assert 'href="C4-walk.html"' in page
    assert "One recall" in (tmp_path / "C4-walk.html").read_text("utf-8")


def test_a_walk_that_cannot_be_shown_is_a_failure_of_its_experiment(tmp_path):
    broken = make("C4", walk=lambda result: Walk("One recall", TRACE, asked=("k",), answers=((("v", 1.0),),)))
    page = write_page([Entry(broken, record("C4"))], tmp_path)
    assert page.broken == ["C4"] and "answers must be 3 tokens by 1 questions" in page.path.read_text("utf-8")
