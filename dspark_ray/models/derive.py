"""Small checkpoints cut out of larger ones, for trying every drafter kind without training one.

Copies tensors; loads no model.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file

from dspark_ray.models.checkpoints import read_tensors, tensor_files

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def first_layers(source: Path, out: Path, num_layers: int) -> Path:
    """A causal LM of the source's first layers, embeddings, norm and head: a draft model with the same vocabulary."""
    config = json.loads((source / "config.json").read_text())
    config["num_hidden_layers"] = num_layers
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:num_layers]
    _write(source, out, config, lambda name: _layer_of(name) < num_layers)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copy(source / name, out / name)
    return out


def without_heads(source: Path, out: Path) -> Path:
    """A DSpark drafter without its sequential and confidence heads: what DFlash is."""
    config = json.loads((source / "config.json").read_text())
    config.update(markov_rank=0, enable_confidence_head=False, confidence_head_with_markov=False)
    _write(source, out, config, lambda name: not name.startswith(("markov_head.", "confidence_head.")))
    return out


def _write(source: Path, out: Path, config: dict[str, object], keep: Callable[[str], bool]) -> None:
    files = tensor_files(str(source))
    out.mkdir(parents=True, exist_ok=True)
    save_file(read_tensors(files, [name for name in files if keep(name)]), out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _layer_of(name: str) -> int:
    """The decoder layer of a tensor; -1 for those outside the layers, which are always kept."""
    match = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return int(match.group(1)) if match else -1
