"""Build wheels from a clean clone, with a compiler and without, and try each where only torch is: `make wheel-test`.

The environment that tries a wheel borrows torch and what torch needs from this one, and has nothing else.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEEDED = ("torch", "numpy", "safetensors")
TRY = """
import torch, innerloop
from innerloop import ops
q, k, v = torch.randn(3, 1, 100, 4, 40).unbind(0)
k, q = torch.nn.functional.normalize(k, dim=-1), q.requires_grad_()
gates = {"g": -torch.rand(1, 100, 4), "beta": torch.rand(1, 100, 4)}
found = [ops.gated_delta_rule(q, k, v, **gates, backend=backend)[0] for backend in (None, "torch")]
slopes = [torch.autograd.grad(x.square().sum(), q)[0] for x in found]
assert (found[0] - found[1]).abs().max() < 1e-5 and (slopes[0] - slopes[1]).abs().max() < 1e-4
print(innerloop.__file__)
"""


def main() -> int:
    """Run both checks and say what was seen."""
    with tempfile.TemporaryDirectory(prefix="wheel-") as name:
        folder = Path(name)
        run("git", "clone", "--quiet", str(ROOT), str(folder / "clone"))
        check(folder / "with", folder / "clone", {}, kernels=True)
        check(folder / "without", folder / "clone", {"CXX": "/bin/false", "CC": "/bin/false"}, kernels=False)
    return 0


def check(folder: Path, clone: Path, environment: dict[str, str], *, kernels: bool) -> None:
    """Build a wheel, look into it, install it where only torch is, and use it."""
    folder.mkdir()
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder), str(clone), **environment)
    (wheel,) = folder.glob("*.whl")
    libraries = look_into(wheel, (clone, folder))
    require(bool(libraries) == kernels, f"{wheel.name} holds {libraries or 'no library'}")
    python = bare(folder / "bare")
    run(str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    for isa in ("", "plain"):
        where = run(str(python), "-c", TRY, INNERLOOP_ISA=isa).strip()
        require(Path(where).is_relative_to(folder / "bare"), f"the wheel's own package is imported, not {where}")
    found = json.loads(run(str(python), "-m", "innerloop", "doctor", "--json"))["kernels"]
    require(found["present"] == kernels, f"doctor: {found}")
    words = f"kernels for {found['instruction_set']}" if kernels else f"no kernels: {found['why_not']}"
    print(f"{wheel.name}: {', '.join(libraries) or 'no library'}; {words}")


def look_into(wheel: Path, private: tuple[Path, ...]) -> list[str]:
    """Return the libraries in a wheel, none of which may name a folder of the machine that built it."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".so")]
        for name in names:
            data = archive.read(name)
            for place in (*private, Path.home(), Path(sys.prefix)):
                require(str(place).encode() not in data, f"{name} names {place}")
            require(re.search(rb"R(UN)?PATH", data) is None, f"{name} has a search path")
    return names


def bare(folder: Path) -> Path:
    """Return the interpreter of a new environment that has torch, what torch needs, and nothing else."""
    venv.create(folder, with_pip=True)
    (target,) = folder.glob("lib/python*/site-packages")
    for name in closure(NEEDED):
        distribution = importlib.metadata.distribution(name)
        paths = [Path(str(file)).parts for file in distribution.files or ()]
        for file in {parts[0] for parts in paths if ".." not in parts}:
            source, link = Path(str(distribution.locate_file(file))), target / file
            if source.exists() and not link.exists() and file != "__pycache__":
                link.symlink_to(source)
    return folder / "bin" / "python"


def closure(names: tuple[str, ...]) -> set[str]:
    """Return some distributions and all that they require here."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        try:
            required = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        if name not in found:
            found.add(name)
            waiting += [re.match(r"[\w.-]+", x)[0] for x in required if "extra ==" not in x]  # pyright: ignore
    return found


def run(*command: str, **environment: str) -> str:
    """Run a command outside of the checkout and return what it prints; a failure is this script's."""
    clean = {x: value for x, value in os.environ.items() if x not in ("PYTHONPATH", "INNERLOOP_LIBRARY")}
    done = subprocess.run(
        command, env={**clean, **environment}, cwd=tempfile.gettempdir(), capture_output=True, text=True, check=False
    )
    require(done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def require(holds: bool, words: str) -> None:
    """Leave with what was wrong."""
    if not holds:
        sys.exit(f"wheel check: {words}")


if __name__ == "__main__":
    sys.exit(main())
