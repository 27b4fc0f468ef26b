"""Checkpoints cut out of larger ones are what their names say."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from dspark_ray.models.checkpoints import load_draft_model
from dspark_ray.models.derive import first_layers, without_heads
from dspark_ray.models.draft_config import read_draft_config


def test_the_first_layers_are_the_whole_model_stopped_early(fixtures_dir: Path, tmp_path: Path) -> None:
    whole = AutoModelForCausalLM.from_pretrained(fixtures_dir / "target").eval()
    cut = AutoModelForCausalLM.from_pretrained(first_layers(fixtures_dir / "target", tmp_path / "cut", 2)).eval()
    assert len(cut.model.layers) == 2
    whole.model.layers = whole.model.layers[:2]
    tokens = torch.tensor([[1, 2, 3, 4]])
    with torch.inference_mode():
        torch.testing.assert_close(cut(tokens).logits, whole(tokens, use_cache=False).logits)


def test_a_drafter_without_heads_is_a_dflash_drafter(fixtures_dir: Path, tmp_path: Path) -> None:
    folder = str(without_heads(fixtures_dir / "draft_vanilla", tmp_path / "dflash"))
    config = read_draft_config(folder)
    assert config.markov_head_type is None
    assert not config.has_confidence_head
    load_draft_model(folder, str(fixtures_dir / "target"), dtype=torch.float32, device="cpu")
