"""A trained model is ready soon after torch is."""

import subprocess
import sys

PROGRAM = """
import sys, torch
from innerloop.lm import Config, LanguageModel
from innerloop.lm.kinds import KINDS
before = set(sys.modules)
for name in KINDS:
    config = Config(vocab_size=50, width=32, pattern=name)
    with torch.device("meta"):
        LanguageModel(config)
print(sorted({"torch._dynamo", "sympy"} & (set(sys.modules) - before)))
import innerloop.training, innerloop.cli
print(sorted({"torch._dynamo", "sympy", "transformers", "tokenizers", "matplotlib", "tensorboard"} & set(sys.modules)))
"""


def test_no_layer_needs_torchs_compiler_to_be_read_from_a_file():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["[]", "[]"], done.stderr
