"""The draft network reproduces the vectors of the reference training code, and our own of an independent dense one."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from dspark_ray.models.checkpoints import load_draft_model
from dspark_ray.models.draft_model import DSparkDraftModel
from tests.models.draft_runner import DraftRunner, greedy_block

HEADS = ["vanilla", "gated", "rnn"]
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


def _load(folder: Path, target: str | None = None) -> tuple[DSparkDraftModel, dict[str, torch.Tensor]]:
    model = load_draft_model(str(folder), target, dtype=torch.float32, device="cpu")
    return model, load_file(folder / "golden.safetensors")


def _check_round(runner: DraftRunner, golden: dict[str, torch.Tensor], name: str) -> None:
    anchor = golden[f"{name}_anchor"]
    hidden = runner.block(anchor)
    tokens, corrected, confidence = greedy_block(runner.model, hidden, anchor)
    assert_close(hidden, golden[f"{name}_hidden"], **TOLERANCE)
    assert_close(confidence, golden[f"{name}_confidence_logits"], **TOLERANCE)
    assert tokens.tolist() == golden[f"{name}_tokens"].tolist()
    if f"{name}_base_logits" in golden:
        assert_close(runner.model.base_logits(hidden), golden[f"{name}_base_logits"], **TOLERANCE)
        assert_close(corrected, golden[f"{name}_corrected_logits"], **TOLERANCE)


@pytest.mark.parametrize("head", HEADS)
def test_two_rounds_on_one_context_cache_match_the_reference(golden_dir: Path, head: str) -> None:
    model, golden = _load(golden_dir / f"draft_{head}", str(golden_dir / "target_qwen3"))
    runner = DraftRunner(model, num_rows=1)
    runner.append(0, golden["r1_features"][0])
    _check_round(runner, golden, "r1")
    runner.append(0, golden["r2_features"][0])
    _check_round(runner, golden, "r2")


@pytest.mark.parametrize("head", HEADS)
def test_teacher_forced_training_blocks_match_the_reference(golden_dir: Path, head: str) -> None:
    model, golden = _load(golden_dir / f"draft_{head}")
    gamma = model.config.block_size
    for ids, features, anchors, keep, logits, confidences in zip(
        *(
            golden[f"train_{name}"]
            for name in ("input_ids", "features", "anchors", "keep", "draft_logits", "confidence_logits")
        ),
        strict=True,
    ):
        kept = [block for block in range(len(anchors)) if keep[block] and anchors[block] + gamma <= len(ids)]
        runner = DraftRunner(model, num_rows=len(kept))
        for row, block in enumerate(kept):
            runner.append(row, features[: anchors[block]])
        previous = torch.stack([ids[anchors[block] : anchors[block] + gamma] for block in kept])
        hidden = runner.block(previous[:, 0])
        assert_close(model.base_logits(hidden) + model.markov_head(previous, hidden), logits[kept], **TOLERANCE)
        embedding = model.markov_head.markov_w1(previous)
        assert_close(model.confidence_head(hidden, embedding), confidences[kept], **TOLERANCE)


@pytest.mark.parametrize("head", HEADS)
def test_two_rounds_match_an_independent_dense_implementation(fixtures_dir: Path, head: str) -> None:
    model, golden = _load(fixtures_dir / f"draft_{head}", str(fixtures_dir / "target"))
    runner = DraftRunner(model, num_rows=1)
    runner.append(0, golden["r1_features"][0])
    _check_round(runner, golden, "r1")
    runner.append(0, golden["r2_features"][0])
    _check_round(runner, golden, "r2")


def test_dflash_predictions_match_an_independent_dense_implementation(fixtures_dir: Path) -> None:
    model, golden = _load(fixtures_dir / "draft_dflash", str(fixtures_dir / "target"))
    runner = DraftRunner(model, num_rows=1)
    for name in ("r1", "r2"):
        runner.append(0, golden[f"{name}_features"][0])
        hidden = runner.block(golden[f"{name}_anchor"])
        assert_close(hidden, golden[f"{name}_hidden"], **TOLERANCE)
        logits = model.base_logits(model.predictions(hidden, model.config.max_draft_tokens))
        assert_close(logits, golden[f"{name}_base_logits"], **TOLERANCE)
        assert logits.argmax(-1).tolist() == golden[f"{name}_tokens"].tolist()
