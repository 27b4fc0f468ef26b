"""The objective: chunks of any size give the same numbers in bounded memory, and every gradient is there."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from dspark_ray.models.autoregressive_draft import DraftNetwork
from dspark_ray.models.checkpoints import load_draft_network
from dspark_ray.training.anchors import AnchorBlocks, sample_anchors
from dspark_ray.training.batches import SupervisedBatch
from dspark_ray.training.draft_trainer import FROZEN, draft_vocabulary
from dspark_ray.training.losses import HeadTargets, LossWeights, head_losses
from dspark_ray.training.objective import DraftVocabulary, Objective, ObjectiveSettings, draft_objective

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
KINDS = ["draft_vanilla", "draft_gated", "draft_rnn", "draft_dflash", "draft_autoregressive"]
VOCAB = 64


def _model(fixtures_dir: Path, kind: str) -> DraftNetwork:
    target = str(fixtures_dir / "target")
    model = load_draft_network(str(fixtures_dir / kind), target, dtype=torch.float32, device="cpu")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in FROZEN)
    return model


def _batch(model: DraftNetwork) -> SupervisedBatch:
    generator = torch.Generator().manual_seed(5)
    ids, lengths = torch.randint(0, VOCAB, (3, 21), generator=generator), torch.tensor([21, 9, 15])
    last = torch.randn(3, 21, 16, generator=generator)
    taps = torch.randn(3, 21, model.fc.in_features, generator=generator)
    return SupervisedBatch(
        ids, lengths, torch.tensor([4, 2, 1]), taps, last, (last @ model.lm_head.weight.T).logsumexp(-1)
    )


def _objective(model: DraftNetwork, chunk: int, weights: LossWeights | None = None) -> Objective:
    batch = _batch(model)
    blocks = sample_anchors(np.random.default_rng(0), batch.reply_starts.numpy(), batch.lengths.numpy(), 6)
    settings = ObjectiveSettings(weights or LossWeights(), 3.0, chunk)
    return draft_objective(model, draft_vocabulary(model, torch.float32), batch, blocks, settings)


@pytest.mark.parametrize("kind", KINDS)
def test_the_size_of_a_chunk_changes_neither_loss_nor_gradient(fixtures_dir: Path, kind: str) -> None:
    runs = []
    for chunk in (1, 7, 10_000):
        model = _model(fixtures_dir, kind)
        objective = _objective(model, chunk)
        objective.loss.backward()
        gradients = [parameter.grad for _, parameter in model.named_parameters() if parameter.requires_grad]
        runs.append((objective.loss.detach(), objective.acceptance, *gradients))
    for other in runs[1:]:
        for ours, theirs in zip(other, runs[0], strict=True):
            assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_every_trained_parameter_gets_a_gradient_and_no_frozen_one(fixtures_dir: Path, kind: str) -> None:
    model = _model(fixtures_dir, kind)
    _objective(model, 8).loss.backward()
    without = [
        name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()
    ]
    assert sorted(without) == sorted(FROZEN)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_the_whole_objective_is_its_slope(fixtures_dir: Path, kind: str) -> None:
    """Central differences along the gradient, through network, head and losses.

    The confidence term is left out: what it is held against moves with the drafts and by design has no gradient.
    """
    model, step = _model(fixtures_dir, kind), 2e-3
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def loss() -> torch.Tensor:
        return _objective(model, 8, LossWeights(0.4, 0.6, 0.0)).loss

    loss().backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in trained]
    slope = float(torch.cat([gradient.flatten() for gradient in gradients]).norm())
    values = []
    with torch.no_grad():
        for move in (step, -2 * step):
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter.add_(gradient, alpha=move / slope)
            values.append(float(loss()))
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(slope, rel=0.02)


def test_a_batch_without_a_supervised_position_costs_nothing(fixtures_dir: Path) -> None:
    model = _model(fixtures_dir, "draft_vanilla")
    nothing = AnchorBlocks(torch.ones(3, 1, dtype=torch.int64), torch.zeros(3, 1, dtype=torch.bool))
    settings = ObjectiveSettings(LossWeights(), 3.0, 8)
    objective = draft_objective(
        model, DraftVocabulary(model.lm_head.weight.detach(), None), _batch(model), nothing, settings
    )
    objective.loss.backward()
    assert objective.loss.item() == 0.0
    assert not objective.mask.any()


def _reserved_by_head(num_positions: int, chunk: int) -> int:
    """Bytes of the largest tensor that the head makes, forward and backward."""
    hidden, rank, vocab = 8, 4, 4096
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(num_positions, hidden + rank, generator=generator, requires_grad=True)
    markov_w2 = torch.randn(vocab, rank, generator=generator, requires_grad=True)
    last = torch.randn(50, hidden, generator=generator)
    head = torch.randn(vocab, hidden, generator=generator)
    rows = torch.randint(0, 50, (num_positions,), generator=generator)
    labels = torch.randint(0, vocab, (num_positions,), generator=generator)
    weights = torch.full((num_positions,), 1 / num_positions)
    targets = HeadTargets(last, (last @ head.T).logsumexp(-1), rows, labels, weights)
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        head_losses(states, markov_w2, head, targets, LossWeights(), chunk).loss.backward()
    # Each event reports an allocation or a free and the bytes in use behind it.
    used = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            used += event.nbytes()
            peak = max(peak, used)
    return peak


def test_memory_of_the_head_follows_the_chunk_and_not_the_positions() -> None:
    few, many = _reserved_by_head(64, 32), _reserved_by_head(1024, 32)
    assert few > 32 * 4096 * 4, "a chunk of logits is made"
    assert many < few + 1024 * 500, "sixteen times the positions: no more than their states beside it"
    assert _reserved_by_head(1024, 1024) > 8 * many, "one chunk of all positions is what is avoided"


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("chunk", [1, 64])
def test_loss_and_confidence_target_are_those_of_the_reference_in_any_chunks(
    golden_dir: Path, head: str, chunk: int
) -> None:
    folder = golden_dir / f"draft_{head}"
    model, golden = (
        load_draft_network(str(folder), None, dtype=torch.float32, device="cpu"),
        load_file(folder / "golden.safetensors"),
    )
    ids, last = golden["train_input_ids"], golden["train_last_hidden"]
    lengths = torch.full((len(ids),), ids.shape[1])
    normalizers = (last @ model.lm_head.weight.T).logsumexp(-1)
    batch = SupervisedBatch(ids, lengths, torch.ones_like(lengths), golden["train_features"], last, normalizers)
    blocks = AnchorBlocks(golden["train_anchors"], golden["train_keep"])
    objective = draft_objective(
        model, draft_vocabulary(model, torch.float32), batch, blocks, ObjectiveSettings(LossWeights(), 4.0, chunk)
    )
    assert_close(objective.loss, golden["train_loss"][0], **TOLERANCE)
    # c* of equation 8 from the reference's own logits
    mask = golden["train_eval_mask"]
    places = (golden["train_anchors"][:, :, None] + torch.arange(7)).clamp(max=39)
    p = (last @ model.lm_head.weight.T).softmax(-1)[torch.arange(2)[:, None, None], places]
    q = golden["train_draft_logits"].softmax(-1)
    assert_close(objective.acceptance[mask], torch.minimum(p, q).sum(-1)[mask], **TOLERANCE)
