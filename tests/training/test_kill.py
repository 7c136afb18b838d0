"""A process that is killed loses the updates since its last checkpoint, and nothing else: `make kill-test`.

Each test kills a run of its own with SIGKILL, looks at what is left, goes on with it, and compares weights, moments and
logs with those of a run that was never killed, to the bit.
"""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest

from innerloop.cli import main
from innerloop.training import Run, find, load_model

PROGRAM = """
import os, signal, sys, torch
from innerloop import states
from innerloop.cli import main

def die():
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)

def nth(number, real, dying):
    seen = []
    def counted(*args, **kwargs):
        seen.append(0)
        return dying(*args) if len(seen) == number else real(*args, **kwargs)
    return counted

def half_written(tensors, path, metadata):
    states_save(tensors, path, metadata)
    os.truncate(path, os.path.getsize(path) // 2)
    die()

states_save = states.save_file
{patch}
sys.exit(main(["train", "--resume", {folder!r}]))
"""

# Updates 1 to 7 have been taken when the eighth dies; a checkpoint writes weights, then moments, every 5 updates.
PATCHES = {
    "inside an update": "torch.nn.utils.clip_grad_norm_ = nth(8, torch.nn.utils.clip_grad_norm_, lambda *x: die())",
    "while weights are written": "states.save_file = nth(3, states.save_file, half_written)",
    "while moments are written": "states.save_file = nth(4, states.save_file, half_written)",
    "before the rename": "os.rename = nth(2, os.rename, lambda *x: die())",
    "before the older checkpoint goes": "import shutil; shutil.rmtree = nth(1, shutil.rmtree, lambda *x: die())",
}
LEFT = {"before the older checkpoint goes": 10}


def killed(folder, patch):
    """Run a process until the patch kills it."""
    program = PROGRAM.format(patch=patch, folder=str(folder))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize(
    "moment", [pytest.param(x, marks=() if x == "before the rename" else pytest.mark.slow) for x in PATCHES]
)
def test_a_run_killed_at_a_bad_moment_ends_as_one_that_never_was(moment, kit, folder, whole):
    killed(folder, PATCHES[moment])
    assert Run.open(folder).step == LEFT.get(moment, 5)
    load_model(folder)
    assert main(["train", "--resume", str(folder)]) == 0
    kit.assert_same(kit.outcome(folder), kit.outcome(whole))
    assert not [path.name for path in folder.iterdir() if path.name.endswith(".partial")]


@pytest.fixture(scope="module")
def long_run(kit, tmp_path_factory):
    """A run of some seconds, never stopped, and how long it took."""
    folder = tmp_path_factory.mktemp("long") / "run"
    plan = kit.plan(kit.place, steps=150, log_every=1, save_every=7, evaluate_every=10)
    Run.prepare(folder, plan)
    shutil.copytree(folder, folder.with_name("fresh"))
    begin = time.perf_counter()
    assert main(["train", "--resume", str(folder)]) == 0
    return folder, time.perf_counter() - begin


@pytest.mark.slow
@pytest.mark.parametrize("number", range(5))
def test_a_run_killed_at_any_moment_ends_as_one_that_never_was(number, kit, long_run, tmp_path):
    whole, seconds = long_run
    folder = tmp_path / "run"
    shutil.copytree(whole.with_name("fresh"), folder)
    process = subprocess.Popen(
        [sys.executable, "-m", "innerloop", "train", "--resume", str(folder)], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    process.stderr.readline()  # the first update is behind
    wait = random.Random().uniform(0, seconds)
    print(f"killed after {wait:.3f} s")
    time.sleep(wait)
    process.kill()
    process.communicate(timeout=60)
    logged = [line.split(",")[0] for line in (folder / "log.csv").read_text().splitlines()[1:]]
    seen = len(logged)
    step = Run.open(folder).step
    # A checkpoint is due after its update's line, and takes a while.
    assert step in {min(seen, 150) // 7 * 7, (seen - 1) // 7 * 7, 150}
    assert main(["train", "--resume", str(folder)]) == 0
    kit.assert_same(kit.outcome(folder), kit.outcome(whole))


@pytest.mark.parametrize("room", [4096, 20_000])
def test_a_disk_without_room_keeps_the_last_checkpoint_and_says_how_to_go_on(room, kit, folder, whole, capsys):
    watch = kit.recorder(5)
    Run.open(folder).train(watch, watch.stop)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        assert main(["train", "--resume", str(folder)]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    last = capsys.readouterr().err.splitlines()[-1]
    assert "File too large" in last
    assert last.endswith(f"the checkpoint of step 5 is kept. Make room, then: innerloop train --resume {folder}")
    assert sorted(path.name for path in folder.glob("*step*")) == ["step-00000005"]
    assert find(folder).name == "step-00000005"
    assert main(["train", "--resume", str(folder)]) == 0
    kit.assert_same(kit.outcome(folder), kit.outcome(whole))


@pytest.mark.parametrize("patch", ["os.fsync = lambda *x: die()",
                                   "os.rename = nth(3, os.rename, lambda *x: die())"])  # fmt: skip
def test_a_text_that_was_half_encoded_when_killed_can_be_begun_anew(patch, kit, tmp_path):
    out = tmp_path / "run"
    if there := "rename" in patch:  # the tokens' own, then those into the folder that is there
        out.mkdir()
    program = PROGRAM.replace('"train", "--resume", {folder!r}', "*{words!r}").format(
        patch=patch,
        words=["train", str(kit.place), "--out", str(out), "--steps", "1", "--length", "16", "--width", "16"],
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 1
    assert (len(os.listdir(out)) == 2) if there else not out.exists()
    words = ["train", str(kit.place), "--out", str(out), "--steps", "1", "--length", "16", "--width", "16"]
    assert main([*words, "--threads", "1"]) == 0
    assert os.listdir(tmp_path) == ["run"]
    assert not [name for name in os.listdir(out) if name.endswith(".partial")]
