"""Two processes on one machine: the same losses and gradients as one process on the joined batch."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from innerloop.lm import LanguageModel

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs" / "language_models.md"


def run(*command):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, check=False, env=environment, timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:]


def launched(*command, processes):
    run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes, *command)


def test_two_processes_learn_what_one_learns(tmp_path):
    run(HERE / "two_processes.py", tmp_path)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert set(found) == {"ddp", "checkpointed ddp", "fsdp", "checkpointed fsdp", "plain fsdp", "loaded"}
        assert max(found.values()) <= 1e-9, found


@pytest.mark.slow
def test_the_documented_command_trains_in_one_process_and_in_two(tmp_path):
    script = re.search(r"```python\n(# train\.py\n.*?)```", DOCS.read_text(), re.DOTALL)
    assert script
    (tmp_path / "train.py").write_text(script[1])
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    models = {}
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        batch = 8 // processes
        launched(tmp_path / "train.py", tmp_path / "text.txt", folder, "--batch", batch, "--steps", 3,
                 processes=processes)  # fmt: skip
        models[processes] = LanguageModel.load(folder)
    for (name, p), q in zip(models[1].named_parameters(), models[2].parameters(), strict=True):
        assert (p - q).abs().max() <= 1e-4, name
