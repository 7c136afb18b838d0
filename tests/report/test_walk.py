"""The page that steps through a recall: its script driven in headless Chromium, as a reader would."""

import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from innerloop.report.walk import Walk, write_walk

SCRIPT = Path(__file__).parents[2] / "scripts" / "screenshots.py"
NASTY = "</script><script>document.title = 'taken'</script>"
WALK = Walk(
    f"Walk {NASTY}",
    {
        "rule": "delta_rule", "tokens": ["k1", NASTY, "k1?"], "surprise": [[1.0, 2.0, 0.0], [3.0, 4.0, 5.0]],
        "written": [[1.0, 0.5, 0.0], [1.0, 1.0, 1.0]], "rank": [[1.0, 2.0, 2.0], [1.0, 1.0, 1.0]],
        "returns": [[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.75, -0.25, 0.0]], [[0.0] * 3, [0.0] * 3, [0.0, 0.5, 0.0]]],
        "half_life": [[None, 1, None], [2, None, None]], "returned": [[0, 1, 0], [-1, -1, 1]],
        "gates": {"beta": [[1.0, 0.5, 0.0], [0.1, 0.2, 0.3]]},
    },
    asked=("k1", "k2"),
    answers=((("v1", 0.9), ("v3", 0.2)), (("v2", 0.8), ("v3", 0.7)), (("v2", 0.8), ("v4", 0.25))),
    right={"k1": "v2"},
)  # fmt: skip


@pytest.fixture(scope="module")
def screenshots():
    spec = importlib.util.spec_from_file_location("screenshots", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["screenshots"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def browser(screenshots):
    program = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, screenshots.NAMES)), None)
    if program is None:
        pytest.skip(f"no Chromium: set CHROMIUM, or install one of {', '.join(screenshots.NAMES)}")
    with screenshots.running(program) as browser:
        yield browser


@pytest.fixture
def opened(browser, tmp_path):
    write_walk(WALK, tmp_path / "walk.html")
    browser.call("Runtime.enable")
    browser.open((tmp_path / "walk.html").as_uri())
    return browser


def text(browser, name):
    return browser.evaluate(f"document.getElementById({json.dumps(name)}).innerText")


def press(browser, name):
    browser.evaluate(f"document.getElementById({json.dumps(name)}).click(), 0")


def key(browser, name):
    browser.call("Input.dispatchKeyEvent", type="keyDown", key=name)
    browser.call("Input.dispatchKeyEvent", type="keyUp", key=name)


def test_it_begins_at_the_first_token(opened):
    assert text(opened, "said") == "Token 1 of 3, k1: reads mostly token 1, k1"
    assert [text(opened, x) for x in ("surprise", "written", "rank", "life", "gates")] == [
        "1.000", "1.000", "1.000", "beyond the sequence", "beta 1.000",
    ]  # fmt: skip
    assert opened.evaluate("document.getElementById('back').disabled") is True
    assert opened.evaluate("document.querySelectorAll('#tokens .future').length") == 2


def test_buttons_keys_and_tokens_step(opened):
    press(opened, "next")
    assert text(opened, "surprise") == "2.000" and text(opened, "life") == "1 token"
    key(opened, "ArrowRight")
    assert text(opened, "said") == "Token 3 of 3, k1?: reads mostly token 1, k1"
    assert opened.evaluate("document.getElementById('next').disabled") is True
    key(opened, "ArrowRight")
    assert text(opened, "said").startswith("Token 3")
    key(opened, "ArrowLeft")
    assert text(opened, "said").startswith("Token 2")
    press(opened, "back")
    assert text(opened, "said").startswith("Token 1")
    opened.evaluate("document.querySelectorAll('#tokens button')[2].click(), 0")
    assert text(opened, "said").startswith("Token 3")
    place = "{ const x = document.getElementById('place'); x.value = 1; x.dispatchEvent(new Event('input')); 0 }"
    opened.evaluate(place)
    assert text(opened, "said").startswith("Token 2")


def test_a_read_is_shown_as_its_parts_with_their_signs(opened):
    opened.evaluate("document.querySelectorAll('#tokens button')[2].click(), 0")
    parts = opened.evaluate("[...document.querySelectorAll('#parts tr')].map((x) => x.innerText).join('|')")
    assert re.findall(r"-?\d\.\d+", parts) == ["0.750", "-0.250"] and parts.startswith("1 k1")
    assert opened.evaluate("document.querySelectorAll('#parts .minus').length") == 1


def test_answers_are_those_of_the_token_and_right_ones_marked(opened):
    rows = "[...document.querySelectorAll('#answers tr')]"
    found = f"{rows}.map((x) => x.className + ' ' + x.cells[0].innerText).join('|')"
    assert opened.evaluate(found) == "no k1 → v1|no k2 → v3"
    press(opened, "next")
    assert opened.evaluate(found) == "ok k1 → v2|no k2 → v3"


def test_another_head_is_another_story(opened):
    change = "{ const x = document.getElementById('head'); x.value = 1; x.dispatchEvent(new Event('change')); 0 }"
    opened.evaluate(change)
    assert text(opened, "said") == "Token 1 of 3, k1: reads nothing" and text(opened, "surprise") == "3.000"
    assert text(opened, "gates") == "beta 0.100"


def test_what_tokens_say_stays_text_and_nothing_is_fetched(opened, tmp_path):
    assert opened.evaluate("document.title").startswith("Walk </script>")
    assert opened.evaluate("document.querySelectorAll('#tokens button')[1].innerText") == NASTY
    assert opened.evaluate("performance.getEntriesByType('resource').length") == 0
    page = (tmp_path / "walk.html").read_text("utf-8")
    assert "http" not in page.replace("http-equiv", "") and "default-src 'none'" in page


@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits_its_screen(opened, width):
    opened.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 500)
    try:
        assert opened.evaluate("document.documentElement.scrollWidth") <= width
    finally:
        opened.call("Emulation.clearDeviceMetricsOverride")


def test_answers_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ValueError, match="answers must be 3 tokens by 1 questions; got 1 by 1"):
        write_walk(Walk("W", WALK.trace, asked=("k1",), answers=((("v", 1.0),),)), tmp_path / "walk.html")
    assert not (tmp_path / "walk.html").exists()
