"""Decoding against reading the weights once, and against a Qwen3.5-type model of transformers of the same sizes.

    python -m scripts.decode [--layers 12] [--width 768] [--words 32000] [--rounds 40] [--json FILE]

All run in turns, a token each; what is printed is the least and the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from innerloop.lm import Config, LanguageModel


def ours(layers: int, width: int, words: int) -> LanguageModel:
    """Return a Gated DeltaNet with heads of 128."""
    pattern = f"{layers}*gated_delta_rule"
    return LanguageModel(Config(vocab_size=words, width=width, heads=max(width // 128, 1), pattern=pattern)).eval()


def theirs(layers: int, width: int, words: int) -> torch.nn.Module | None:
    """Return transformers' model of as many layers, or None without transformers.

    The last is full attention: their cache cannot decode without one (5.24).
    """
    try:
        from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    except ImportError:
        return None
    heads = max(width // 128, 1)
    inner = Config(vocab_size=words, width=width, heads=heads).inner_width
    config = Qwen3_5TextConfig(
        vocab_size=words, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, linear_num_key_heads=heads, linear_num_value_heads=heads,
        linear_key_head_dim=128, linear_value_head_dim=128, head_dim=width // heads,
        layer_types=["linear_attention"] * (layers - 1) + ["full_attention"], tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3_5ForCausalLM(config).eval()


def reading(model: torch.nn.Module) -> Callable[[], object]:
    """Return what reads every weight once: the sum of each matrix, the fastest pass over memory that torch has."""
    weights = [p.detach() for p in model.parameters()]
    return lambda: [weight.sum() for weight in weights]


def decoding(model: torch.nn.Module) -> Callable[[], object]:
    """Return what decodes one token more."""
    prompt = torch.ones(1, 8, dtype=torch.int64)
    stream = model.generate(prompt, temperature=0) if isinstance(model, LanguageModel) else _stream(model, prompt)
    next(stream)
    return lambda: next(stream)


@torch.no_grad()
def _stream(model: torch.nn.Module, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
    cache = None
    while True:
        out = model(tokens, cache=cache, use_cache=True, logits_to_keep=1)
        cache, tokens = out.cache, out.logits[:, -1:].argmax(-1)
        yield tokens


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("layers", 12), ("width", 768), ("words", 32_000), ("rounds", 40)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    model, other = (make(given.layers, given.width, given.words) for make in (ours, theirs))
    assert model is not None
    runs = {"read": reading(model), "decode": decoding(model)}
    if other is not None:
        runs |= {"read theirs": reading(other), "decode theirs": decoding(other)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(given.rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    found = {name: {"least": min(t), "median": sorted(t)[len(t) // 2]} for name, t in times.items()}
    parameters = {name: sum(p.numel() for p in m.parameters()) for name, m in (("ours", model), ("theirs", other)) if m}
    for name, row in found.items():
        print(f"{name:14} least {1e3 * row['least']:7.2f} ms, median {1e3 * row['median']:7.2f} ms")
    print(f"parameters {parameters}, {torch.get_num_threads()} threads")
    for which in ("least", "median"):
        print(f"{which}: decode / read {found['decode'][which] / found['read'][which]:.2f}", end="")
        print(f", theirs / ours {found['decode theirs'][which] / found['decode'][which]:.2f}" if other else "")
    if given.json:
        machine = {"machine": platform.processor(), "torch": torch.__version__, "threads": torch.get_num_threads()}
        given.json.write_text(json.dumps({**machine, **vars(given), "json": None, "times": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
