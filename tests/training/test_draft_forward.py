"""The training forward and the objective reproduce the reference training code, and inference."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from dspark_ray.models.checkpoints import load_draft_model
from dspark_ray.models.draft_model import DSparkDraftModel
from dspark_ray.training.anchors import AnchorBlocks
from dspark_ray.training.batches import SupervisedBatch
from dspark_ray.training.draft_forward import draft_hidden
from dspark_ray.training.losses import LossWeights
from dspark_ray.training.objective import DraftVocabulary, ObjectiveSettings, draft_objective
from tests.models.draft_runner import DraftRunner

HEADS = ["vanilla", "gated", "rnn"]
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
SETTINGS = ObjectiveSettings(LossWeights(), decay=4.0, head_chunk=7)


def _load(folder: Path) -> tuple[DSparkDraftModel, dict[str, torch.Tensor]]:
    model = load_draft_model(str(folder), None, dtype=torch.float32, device="cpu")
    return model, load_file(folder / "golden.safetensors")


def _batch(model: DSparkDraftModel, golden: dict[str, torch.Tensor]) -> SupervisedBatch:
    ids, last = golden["train_input_ids"], golden["train_last_hidden"]
    normalizers = (last @ model.lm_head.weight.T).logsumexp(-1)
    lengths = torch.full((len(ids),), ids.shape[1])
    return SupervisedBatch(ids, lengths, torch.ones_like(lengths), golden["train_features"], last, normalizers)


def _blocks(golden: dict[str, torch.Tensor]) -> AnchorBlocks:
    return AnchorBlocks(golden["train_anchors"], golden["train_keep"])


@pytest.mark.parametrize("head", HEADS)
def test_teacher_forced_logits_and_confidences_match_the_reference(golden_dir: Path, head: str) -> None:
    model, golden = _load(golden_dir / f"draft_{head}")
    batch, blocks, mask = _batch(model, golden), _blocks(golden), golden["train_eval_mask"]
    hidden = draft_hidden(model, batch.taps, batch.token_ids, blocks)
    places = (blocks.positions[:, :, None] + torch.arange(model.config.block_size)).clamp(max=39)
    previous = batch.token_ids.gather(1, places.flatten(1)).view(places.shape)
    logits = model.base_logits(hidden) + model.markov_head(previous, hidden)
    confidences = model.confidence_head(hidden, model.markov_head.markov_w1(previous))
    assert_close(logits[mask], golden["train_draft_logits"][mask], **TOLERANCE)
    assert_close(confidences[mask], golden["train_confidence_logits"][mask], **TOLERANCE)


@pytest.mark.parametrize("head", HEADS)
def test_the_loss_matches_the_reference(golden_dir: Path, head: str) -> None:
    model, golden = _load(golden_dir / f"draft_{head}")
    objective = draft_objective(
        model, DraftVocabulary(model.lm_head.weight, None), _batch(model, golden), _blocks(golden), SETTINGS
    )
    assert torch.equal(objective.mask, golden["train_eval_mask"])
    assert_close(objective.loss, golden["train_loss"][0], **TOLERANCE)


@pytest.mark.parametrize("name", ["draft_vanilla", "draft_dflash"])
def test_blocks_of_one_sequence_equal_those_that_inference_computes_one_by_one(fixtures_dir: Path, name: str) -> None:
    model = load_draft_model(str(fixtures_dir / name), str(fixtures_dir / "target"), dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 60, (2, 19), generator=generator)
    taps = torch.randn(2, 19, model.fc.in_features, generator=generator)
    anchors = torch.tensor([[1, 2, 9, 18], [4, 5, 6, 7]])
    hidden = draft_hidden(model, taps, ids, AnchorBlocks(anchors, torch.ones_like(anchors, dtype=torch.bool)))
    for row in range(2):
        for index, anchor in enumerate(anchors[row].tolist()):
            runner = DraftRunner(model, num_rows=1)
            runner.append(0, taps[row, :anchor])
            assert_close(hidden[row, index], runner.block(ids[row, anchor : anchor + 1])[0], **TOLERANCE)
