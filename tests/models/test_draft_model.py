"""The draft network over pages: batches, layouts, vocabularies, dtypes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from dspark_ray.models.checkpoints import load_draft_model, load_feature_projection
from dspark_ray.models.draft_model import DSparkDraftModel, block_tokens
from tests.models.draft_runner import DraftRunner


@pytest.fixture(scope="module")
def model(fixtures_dir: Path) -> DSparkDraftModel:
    return load_draft_model(str(fixtures_dir / "draft_vanilla"), None, dtype=torch.float32, device="cpu")


def test_a_ragged_batch_of_requests_equals_each_alone(model: DSparkDraftModel) -> None:
    torch.manual_seed(1)
    contexts, anchors = [torch.randn(length, 32) for length in (9, 0, 1, 23)], torch.tensor([3, 5, 60, 0])
    together = DraftRunner(model, num_rows=4)
    for row, taps in enumerate(contexts):
        together.append(row, taps)
    hidden = together.block(anchors)
    assert hidden.isfinite().all()  # free slots hold NaN: none was read
    for row, taps in enumerate(contexts):
        alone = DraftRunner(model, num_rows=1)
        alone.append(0, taps)
        assert_close(hidden[row], alone.block(anchors[row : row + 1])[0], atol=1e-5, rtol=1e-5)


def test_context_appended_in_pieces_between_blocks_equals_one_piece(model: DSparkDraftModel) -> None:
    torch.manual_seed(2)
    taps, anchor = torch.randn(12, 32), torch.tensor([7])
    pieces, whole = DraftRunner(model, num_rows=1), DraftRunner(model, num_rows=1)
    for start, end in ((0, 5), (5, 6), (6, 12)):
        pieces.append(0, taps[start:end])
        pieces.block(anchor)  # its K/V is overwritten by what is appended next
    whole.append(0, taps)
    assert_close(pieces.block(anchor), whole.block(anchor), atol=1e-5, rtol=1e-5)


def test_block_positions_see_each_other_in_both_directions(model: DSparkDraftModel) -> None:
    runner = DraftRunner(model, num_rows=1)
    runner.append(0, torch.randn(4, 32))
    masks_only = runner.block(torch.tensor([model.config.mask_token_id]))
    anchored = runner.block(torch.tensor([1]))
    assert not torch.allclose(masks_only[0, -1], anchored[0, -1])  # the anchor reaches the last mask
    assert block_tokens(torch.tensor([1, 2]), model.config).tolist() == [[1, *[63] * 4], [2, *[63] * 4]]


def test_predictions_start_at_the_anchor_for_dspark_and_at_the_first_mask_for_dflash(
    model: DSparkDraftModel, fixtures_dir: Path
) -> None:
    dflash = load_draft_model(
        str(fixtures_dir / "draft_dflash"), str(fixtures_dir / "target"), dtype=torch.float32, device="cpu"
    )
    hidden = torch.arange(5.0)[None, :, None]
    assert model.predictions(hidden, 3).flatten().tolist() == [0, 1, 2]
    assert dflash.predictions(hidden, 3).flatten().tolist() == [1, 2, 3]
    assert (model.config.max_draft_tokens, dflash.config.max_draft_tokens) == (5, 4)
    assert dflash.markov_head is None
    assert dflash.confidence_head is None


def test_the_projection_loads_alone_and_equals_the_drafters_own(model: DSparkDraftModel, fixtures_dir: Path) -> None:
    projection = load_feature_projection(str(fixtures_dir / "draft_vanilla"), dtype=torch.float32, device="cpu")
    taps = torch.randn(3, 32)
    assert torch.equal(projection(taps), model.project(taps))
    assert sum(parameter.numel() for parameter in projection.parameters()) == 16 * 32 + 16


def test_rope_comes_from_the_drafters_own_configuration(model: DSparkDraftModel, fixtures_dir: Path) -> None:
    assert model.config.transformer.rope_parameters["rope_theta"] == 5000.0  # the target has another one
    expected = 5000.0 ** (-torch.arange(4) / 4)
    assert_close(model.rotary_emb.inv_freq, expected)


def test_half_precision_weights_keep_float32_rotary_frequencies(fixtures_dir: Path) -> None:
    folder = fixtures_dir / "draft_vanilla"
    half = load_draft_model(str(folder), None, dtype=torch.bfloat16, device="cpu")
    golden = load_file(folder / "golden.safetensors")
    assert half.rotary_emb.inv_freq.dtype == torch.float32
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    runner = DraftRunner(half, num_rows=1)
    runner.append(0, golden["r1_features"][0])
    difference = (runner.block(golden["r1_anchor"]).float() - golden["r1_hidden"]).norm() / golden["r1_hidden"].norm()
    assert difference < 0.1
