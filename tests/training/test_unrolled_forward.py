"""The autoregressive drafter's training forward computes what its inference does, and learns."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from dspark_ray.models.autoregressive_draft import AutoregressiveDraftModel
from dspark_ray.models.checkpoints import load_autoregressive_model
from dspark_ray.training.anchors import AnchorBlocks
from dspark_ray.training.unrolled_forward import unrolled_hidden

CONTEXT = 10  # tokens before the anchor of the second golden round


@pytest.fixture
def model(fixtures_dir: Path) -> AutoregressiveDraftModel:
    folder = str(fixtures_dir / "draft_autoregressive")
    target = str(fixtures_dir / "target")
    return load_autoregressive_model(folder, target, dtype=torch.float32, device="cpu").requires_grad_()


@pytest.fixture
def golden(fixtures_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(fixtures_dir / "draft_autoregressive" / "golden.safetensors")


def _drafted(golden: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Taps and token ids of a sequence whose tokens after the anchor are the golden round's drafts."""
    features = torch.cat([golden["r1_features"], golden["r2_features"]], dim=1)
    context = torch.cat([golden["r1_context_tokens"], golden["r2_context_tokens"]], dim=1)
    token_ids = torch.cat([context, golden["r2_anchor"][None], golden["r2_tokens"]], dim=1)
    unread = torch.full((1, token_ids.shape[1] - CONTEXT, features.shape[-1]), torch.nan)
    return torch.cat([features, unread], dim=1), token_ids


def _blocks(*anchors: int) -> AnchorBlocks:
    positions = torch.tensor([anchors])
    return AnchorBlocks(positions, torch.ones_like(positions, dtype=torch.bool))


def test_over_its_own_drafts_training_computes_the_hidden_states_of_drafting(
    model: AutoregressiveDraftModel, golden: dict[str, torch.Tensor]
) -> None:
    taps, token_ids = _drafted(golden)
    hidden = unrolled_hidden(model, taps.nan_to_num(), token_ids, _blocks(CONTEXT))
    assert_close(hidden[:, 0], golden["r2_hidden"], atol=1e-5, rtol=1e-5)


def test_blocks_see_neither_each_other_nor_the_context_after_their_anchor(
    model: AutoregressiveDraftModel, golden: dict[str, torch.Tensor]
) -> None:
    taps, token_ids = _drafted(golden)
    changed = taps.nan_to_num().clone()
    changed[:, 4:] = 9.0
    together = unrolled_hidden(model, taps.nan_to_num(), token_ids, _blocks(4, 7))
    alone = unrolled_hidden(model, changed, token_ids, _blocks(4))
    assert_close(together[:, 0], alone[:, 0], atol=1e-5, rtol=1e-5)


def test_the_last_step_trains_the_features_of_the_context(
    model: AutoregressiveDraftModel, golden: dict[str, torch.Tensor]
) -> None:
    """Steps feed on one another: the gradient of the last reaches `fc` through all of them."""
    taps, token_ids = _drafted(golden)
    hidden = unrolled_hidden(model, taps.nan_to_num(), token_ids, _blocks(1))
    hidden[:, :, -1].sum().backward()
    assert model.fc.weight.grad is not None
    assert model.fc.weight.grad.abs().sum() > 0
