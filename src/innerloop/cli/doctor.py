"""Say what this machine and this installation can do."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

from innerloop._version import __version__

NAME = "doctor"

_MAPS, _FLAGS = Path("/proc/self/maps"), Path("/proc/cpuinfo")
_FEATURES = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16")
_VARIABLES = (
    "INNERLOOP_BACKEND", "INNERLOOP_ISA", "INNERLOOP_PAIRS", "INNERLOOP_LIBRARY", "INNERLOOP_DATA", "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
)  # fmt: skip


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print what was found.

    Args:
        arguments: What :func:`add` declared.

    Returns:
        0: nothing that is missing keeps the library from working.
    """
    found = findings()
    print(json.dumps(found, indent=1) if arguments.json else text(found))
    return 0


def findings() -> dict[str, Any]:
    """Return all that is said, as plain values."""
    import torch

    from innerloop import rules
    from innerloop.checks import refusal
    from innerloop.kernels.native import instruction_set, missing

    served = [module.RULE.name for module in rules.ALL if not refusal(module.RULE)]
    return {
        "innerloop": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "threads": {"torch": torch.get_num_threads(), "cores": len(_cores())},
        "kernels": {
            "present": not missing(),
            "why_not": missing() or None,
            "instruction_set": instruction_set() or None,
            "rules": served,
            "error": _error() if served else None,
        },
        "processor": {name: name in _flags() for name in _FEATURES},
        "openmp": openmp(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "extras": extras(),
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def text(found: dict[str, Any]) -> str:
    """Return the findings in a few lines."""
    kernels, threads, openmp_found = found["kernels"], found["threads"], found["openmp"]
    if kernels["present"]:
        native = (
            f"yes, for {kernels['instruction_set']}, serving {', '.join(kernels['rules'])}; one call agrees with the "
            f"portable form to {kernels['error']:.0e}"
        )
    else:
        native = f"no: {kernels['why_not']}. Everything runs in torch"
    shared = {True: "shared with torch", False: "NOT shared with torch: threads of both may compete", None: "not known"}
    lines = {
        "innerloop": f"{found['innerloop']}, Python {found['python']}, torch {found['torch']}, {found['system']}",
        "threads": f"{threads['torch']} of torch, {threads['cores']} cores for this process",
        "kernels": native,
        "processor": ", ".join(f"{name} {'yes' if x else 'no'}" for name, x in found["processor"].items()),
        "OpenMP": f"{', '.join(openmp_found['libraries']) or 'none seen'}; {shared[openmp_found['shared']]}",
        "GPU": f"{found['gpu']}, through torch" if found["gpu"] else "none",
        **{f"[{name}]": _extra_text(name, missing) for name, missing in found["extras"].items()},
        **found["environment"],
    }
    width = max(map(len, lines)) + 2
    return "\n".join(f"{name:<{width}}{words}" for name, words in lines.items())


def _extra_text(name: str, missing: list[str]) -> str:
    return f"lacks {', '.join(missing)}: pip install 'innerloop[{name}]'" if missing else "complete"


def openmp() -> dict[str, Any]:
    """Return which OpenMP runtimes are mapped, and whether kernels and torch share one; None where nobody can tell."""
    from innerloop.kernels.native import missing

    try:
        mapped = {line.split()[-1] for line in _MAPS.read_text(encoding="utf-8").splitlines() if "/" in line}
    except OSError:
        return {"libraries": [], "shared": None}
    libraries = sorted({Path(x).name for x in mapped if re.search(r"lib(g|i)?omp\d*[-.]", x)})
    return {"libraries": libraries, "shared": None if missing() or not libraries else len(libraries) == 1}


def extras() -> dict[str, list[str]]:
    """Return, for each extra, which of its packages are missing; nothing where this is no installed package."""
    try:
        required = importlib.metadata.requires("innerloop") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found: dict[str, list[str]] = {}
    for line in required:
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        name = re.match(r"[\w.-]+", line)
        if extra and name and name[0] != "innerloop" and extra[1] != "dev":
            lacks = found.setdefault(extra[1], [])
            lacks += [] if _installed(name[0]) else [name[0]]
    return found


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _cores() -> set[int]:
    return os.sched_getaffinity(0) if sys.platform == "linux" else set(range(os.cpu_count() or 1))


def _flags() -> set[str]:
    try:
        lines = _FLAGS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    flags = [line.partition(":")[2].split() for line in lines if line.startswith("flags")]
    return set(flags[0]) if flags else set()


def _error() -> float:
    """Return how far a small call's two forms are apart, relative to the largest number."""
    import torch

    from innerloop.testing import draw_call

    call = draw_call("gated_delta_rule", T=70, K=32, V=32, dtype=torch.float32)
    ours, portable = (call.run(backend=backend)[0] for backend in ("cpu", "torch"))
    return float((ours - portable).abs().max() / portable.abs().max())
