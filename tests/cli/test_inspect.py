"""``innerloop inspect``: rules, files and models, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import save_file

from innerloop import ops
from innerloop.cli import main
from innerloop.data import ByteTokenizer
from innerloop.lm import Config, LanguageModel


def test_a_rule_is_shown_over_a_recall(tmp_path, capsys):
    assert main(["inspect", "delta_rule", "--gate", "beta=0.5", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("delta_rule: delta_rule, 12 tokens") and "k1=v5" in out
    stored = json.loads((tmp_path / "trace.json").read_text())["delta_rule"]
    assert stored["written"][0][:8] == pytest.approx([0.5] * 8) and stored["gates"]["beta"][0][8:] == [0] * 4
    assert (tmp_path / "delta_rule.svg").read_text().startswith("<svg")
    assert "k1=v5" in (tmp_path / "delta_rule.html").read_text()


def test_a_rule_is_shown_over_tensors_of_a_file(tmp_path, capsys):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 6, 2, 4, generator=generator) for _ in range(3))
    g = -torch.rand(1, 6, 2, generator=generator)
    save_file({"q": q, "k": k, "v": v, "g": g}, tmp_path / "sequence.safetensors")
    words = ["inspect", "mamba2", "--sequence", str(tmp_path / "sequence.safetensors"), "--out", str(tmp_path / "out")]
    assert main([*words, "--most", "4"]) == 0
    stored = json.loads((tmp_path / "out" / "trace.json").read_text())["mamba2"]
    parts = torch.tensor(stored["returns"], dtype=torch.float64)
    o, _ = ops.mamba2(q[:, :4], k[:, :4], v[:, :4], g=g[:, :4])
    read = torch.einsum("gti,igv->tgv", parts, v[0, :4].double())
    torch.testing.assert_close(read, o[0].double(), atol=1e-4, rtol=1e-4)


def test_a_model_is_shown_layer_by_layer(tmp_path, capsys):
    torch.manual_seed(0)
    tokenizer = ByteTokenizer()
    model = LanguageModel(Config(vocab_size=len(tokenizer), width=16, heads=2, pattern="kda+attention"))
    model.save(tmp_path / "model")
    tokenizer.save(tmp_path / "model" / "tokenizer.json")
    assert main(["inspect", str(tmp_path / "model"), "--text", "abcab", "--out", str(tmp_path / "out")]) == 0
    stored = json.loads((tmp_path / "out" / "trace.json").read_text())
    assert {name: (x["rule"], len(x["tokens"])) for name, x in stored.items()} == {
        "blocks.0.layer": ("kda", 5), "blocks.1.layer": ("softmax_attention", 5),
    }  # fmt: skip
    assert stored["blocks.0.layer"]["tokens"] == list("abcab")
    assert (tmp_path / "out" / "blocks.1.layer.html").is_file()
    assert main(["inspect", str(tmp_path / "model"), "--out", str(tmp_path / "none")]) == 2
    assert "--text must say" in capsys.readouterr().err and not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["delta_rul"], "TARGET must be a model's folder or one of softmax_attention"),
        (["delta_rule", "--gate", "gamma=1"], "delta_rule takes beta; got an unknown 'gamma'"),
        (["delta_rule", "--gate", "beta"], "--gate must be NAME=NUMBER"),
        (["delta_rule", "--text", "a"], "--text is for a model"),
        (["delta_rule", "--most", "0"], "--most must be at least 1"),
        (["delta_rule", "--sequence", "missing"], "missing"),
        (["mamba2", "--gate", "g=0.5"], "g"),
        (["."], "--text must say"),
    ],
)
def test_wrong_words_get_one_line_and_leave_nothing(words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("innerloop inspect: ") and said in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_something_else_is_refused(tmp_path, capsys):
    (tmp_path / "x.safetensors").write_bytes(b"nothing")
    save_file({"q": torch.zeros(1, 2, 1, 3)}, tmp_path / "y.safetensors")
    for name, said in (("x", "must be a safetensors file"), ("y", "lacks k, v")):
        assert main(["inspect", "delta_rule", "--sequence", str(tmp_path / f"{name}.safetensors")]) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1
