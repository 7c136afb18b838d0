"""The README's code runs, and names what exists."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from innerloop import ops, rules

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")


def test_the_code_runs():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
        out = names["o"]
        assert isinstance(out, torch.Tensor)
        assert out.isfinite().all()
    assert torch.allclose(torch.cat((names["first"], names["second"]), 1), names["y"], atol=1e-5)


def test_the_table_names_every_rule():
    rows = [line for line in README.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == {module.RULE.name for module in rules.ALL}
    assert all(hasattr(ops, name) for name in named)


def test_links_and_pictures_lead_somewhere():
    targets = re.findall(r"\]\(([^)]+)\)", README)
    assert targets
    for target in targets:
        assert (ROOT / target.partition("#")[0]).is_file(), target


def test_every_make_target_it_names_exists():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    texts = README + (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    targets = re.findall(r"(?:`|^    )make ([a-z-]+)", texts, re.MULTILINE)
    assert len(targets) > 5
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
