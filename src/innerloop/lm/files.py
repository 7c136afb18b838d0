"""A model's folder: ``config.json`` and ``model.safetensors``, each replaced in one step."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from innerloop import states
from innerloop.files import write_text
from innerloop.lm.config import VERSION, Config

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_INDEX = "model.safetensors.index.json"
"""Which file holds which tensor, where ``save_pretrained`` has written several."""
MODEL_TYPE = "innerloop"
"""What ``transformers`` knows our models by."""
_PREFIX = "model."
"""In front of our names where the Hugging Face face has written them."""


def write_model(folder: str | os.PathLike[str], config: Config, weights: Mapping[str, Tensor]) -> None:
    """Write both files; the weights last, which say of what configuration they are."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    fields = config.to_dict()
    architecture = {"model_type": MODEL_TYPE, "architectures": ["InnerloopForCausalLM"], "innerloop": fields}
    write_text(folder / CONFIG, json.dumps(architecture, indent=2) + "\n")
    states.write(folder / WEIGHTS, dict(weights), {"format": "pt", "innerloop": json.dumps(fields)})


def read_model(folder: str | os.PathLike[str]) -> tuple[Config, dict[str, Tensor]]:
    """Return a folder's configuration and weights; ValueError if they are not a model's or damaged."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} must be a folder that LanguageModel.save wrote; there is none")
    fields = read_config(folder / CONFIG)
    if fields.get("version") != VERSION:
        raise ValueError(f"{folder / CONFIG} must have version {VERSION}; got {fields.get('version')}. "
                         "Load it with the release of innerloop that wrote it")  # fmt: skip
    metadata, weights = _read_weights(folder)
    if "innerloop" in metadata:
        # A run that ended between the two files left the newer configuration beside the older weights.
        fields = json.loads(metadata["innerloop"])
    return Config.from_dict(fields), {name.removeprefix(_PREFIX): x for name, x in weights.items()}


def _read_weights(folder: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    if (folder / WEIGHTS).exists() or not (folder / _INDEX).exists():
        return states.read(folder / WEIGHTS)
    index = _read_json(folder / _INDEX)
    found: dict[str, Tensor] = {}
    for name in sorted(set(index.get("weight_map", {}).values())):
        found |= states.read(folder / Path(name).name)[1]
    return {}, found


def _read_json(path: Path) -> Any:  # ruff: ignore[any-type] - JSON may be anything
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} must hold JSON; it cannot be read: {error}") from None


def read_config(path: Path) -> dict[str, Any]:
    """Return the fields of the configuration that a ``config.json`` holds; ValueError if it holds none."""
    values = _read_json(path)
    if not isinstance(values, dict) or not isinstance(values.get("innerloop"), dict):
        raise ValueError(f"{path} must be the configuration of an innerloop model; it is something else")
    return values["innerloop"]
