"""Converts a GGUF of a causal LM into a safetensors folder (bf16) with tokenizer and chat template.

Run as a child process: `python -m dspark_ray.models.convert_gguf FILE.gguf OUT`.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(gguf: Path, out: Path) -> None:
    """Dequantise `gguf` to bf16 and write a folder that transformers loads without the packages gguf and accelerate."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    versions = {package: version(package) for package in ("torch", "transformers", "gguf", "tokenizers")}
    (out / "provenance.json").write_text(json.dumps({"dtype": "bfloat16", **versions}, indent=2) + "\n")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
