"""Features of the frozen target equal what transformers computes by itself, however sequences are packed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from dspark_ray.errors import ConfigError
from dspark_ray.training.batches import SequenceFeatures, supervised_batch
from dspark_ray.training.config import TeacherConfig
from dspark_ray.training.features import FeatureExtractor
from dspark_ray.training.sequences import TrainingSequence
from tests.chat_models import FAMILIES, save_chat_model
from tests.training.runs import random_sequences

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
LAYERS = (-1, 0, 2)  # the embeddings, the first layer, the last but one


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    save_chat_model(folder, request.param, num_layers=4)
    return folder


def extractor(target: Path, layers: tuple[int, ...] = LAYERS, max_batch_tokens: int = 2048) -> FeatureExtractor:
    config = TeacherConfig(model=str(target), dtype="float32", device="cpu", max_batch_tokens=max_batch_tokens)
    return FeatureExtractor(config, layers)


def of_transformers(model: Any, sequence: TrainingSequence) -> SequenceFeatures:
    with torch.no_grad():
        output = model(torch.tensor([sequence.token_ids]), output_hidden_states=True)
    # hidden_states[i + 1] is the output of layer i; the last of them has gone through the final norm already.
    taps = torch.cat([output.hidden_states[layer + 1][0] for layer in LAYERS], dim=-1)
    return SequenceFeatures(taps, output.hidden_states[-1][0], output.logits[0].float().logsumexp(-1))


@pytest.mark.parametrize("max_batch_tokens", [16, 100, 2048])
def test_taps_last_hidden_states_and_normalisers_equal_transformers(target: Path, max_batch_tokens: int) -> None:
    sequences = [*random_sequences(6), TrainingSequence((7, 8), 1, 0.0)]
    packed = extractor(target, max_batch_tokens=max_batch_tokens).extract(sequences)
    assert packed.lengths == tuple(len(sequence.token_ids) for sequence in sequences)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    for sequence, ours in zip(sequences, packed.split(), strict=True):
        theirs = of_transformers(model, sequence)
        assert_close(ours.taps, theirs.taps, **TOLERANCE)
        assert_close(ours.last_hidden, theirs.last_hidden, **TOLERANCE)
        first = sequence.reply_start - 1  # the place from which the first reply token is predicted
        assert_close(ours.log_normalizers[first:], theirs.log_normalizers[first:], **TOLERANCE)
        assert not ours.log_normalizers[:first].any()


def test_an_extractor_forgets_the_sequences_of_the_call_before(target: Path) -> None:
    """Pages are used again, for other lengths."""
    reused = extractor(target)
    first, second = random_sequences(4, seed=1), random_sequences(3, seed=2)
    reused.extract(first)
    ours, theirs = reused.extract(second), extractor(target).extract(second)
    assert torch.equal(ours.taps, theirs.taps)
    assert torch.equal(ours.last_hidden, theirs.last_hidden)


def test_padding_of_a_batch_is_zero(target: Path) -> None:
    sequences = random_sequences(3)
    batch = supervised_batch(sequences, extractor(target).extract(sequences).split())
    for row, length in enumerate(batch.lengths.tolist()):
        assert batch.taps[row, :length].abs().sum(-1).all()
        for name in ("taps", "last_hidden", "log_normalizers", "token_ids"):
            assert not getattr(batch, name)[row, length:].any()
    assert batch.num_tokens == sum(len(sequence.token_ids) for sequence in sequences)


def test_a_layer_that_the_target_lacks_is_refused(target: Path) -> None:
    with pytest.raises(ConfigError, match="4"):
        extractor(target, layers=(0, 4))
