"""The Markov head's start: the corpus' bigrams, in the head that training then goes on with."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dspark_ray.models.autoregressive_draft import DraftNetwork
from dspark_ray.models.checkpoints import load_draft_network
from dspark_ray.models.heads import MarkovHead
from dspark_ray.training.markov_start import STRENGTH, bigram_factors, bigrams, start_markov_head
from dspark_ray.training.sequences import TrainingSequence

NUM_TOKENS = 12


def chain(seed: int = 0, count: int = 40, length: int = 60) -> list[TrainingSequence]:
    """Sequences of a Markov chain whose every token has one likely successor: the next one, modulo NUM_TOKENS."""
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(count):
        tokens = [int(rng.integers(NUM_TOKENS))]
        for _ in range(length - 1):
            likely = rng.random() < 0.8
            tokens.append((tokens[-1] + 1) % NUM_TOKENS if likely else int(rng.integers(NUM_TOKENS)))
        sequences.append(TrainingSequence(tuple(tokens), 4, 1.0))
    return sequences


def test_only_replies_are_counted_and_the_last_prompt_token_stands_before_the_first() -> None:
    before, behind = bigrams([TrainingSequence((1, 2, 3, 4, 5), 3, 0.0), TrainingSequence((6, 7, 8), 2, 0.0)])
    assert list(zip(before.tolist(), behind.tolist(), strict=True)) == [(3, 4), (4, 5), (7, 8)]


def test_at_full_rank_the_factors_are_the_pointwise_mutual_information() -> None:
    counts = torch.from_numpy(np.random.default_rng(1).integers(50, 400, (10, 10))).float()
    left, right = bigram_factors(counts, rank=10, seed=0)
    information = (counts / counts.sum(1, keepdim=True) / (counts.sum(0) / counts.sum())).log()
    assert (left @ right.T - information).abs().max() < 0.1  # smoothed by pseudo-counts


def test_a_head_that_is_wider_than_the_vocabulary_is_filled_up_with_zeros() -> None:
    left, right = bigram_factors(torch.full((3, 3), 5.0) + 40 * torch.eye(3), rank=8, seed=0)
    assert left.shape == right.shape == (3, 8)
    assert not left[:, 3:].any()
    assert left.isfinite().all()


def network(fixtures_dir: Path, kind: str) -> DraftNetwork:
    """A drafter of the fixtures; a Markov head gets a rank that can hold a whole cycle of tokens."""
    target = str(fixtures_dir / "target")
    model = load_draft_network(str(fixtures_dir / f"draft_{kind}"), target, dtype=torch.float32, device="cpu")
    if model.markov_head is not None:
        vocab_size = model.config.vocab_size
        model.markov_head = MarkovHead("vanilla", vocab_size, vocab_size, 16, model.config.hidden_size)
    return model


@torch.no_grad()
def bias_behind(model: DraftNetwork, token: int) -> torch.Tensor:  # [V]
    assert model.markov_head is not None
    return model.markov_head(torch.tensor([[token]]), torch.zeros(1, 1, model.config.hidden_size))[0, 0]


def test_the_bias_of_a_vanilla_head_prefers_what_follows_in_the_corpus(fixtures_dir: Path) -> None:
    model = network(fixtures_dir, "vanilla")
    start_markov_head(model, chain())
    likely = [int(bias_behind(model, token)[:NUM_TOKENS].argmax()) for token in range(NUM_TOKENS)]
    assert likely == [(token + 1) % NUM_TOKENS for token in range(NUM_TOKENS)]


def test_a_pruned_vocabulary_gets_the_biases_of_its_own_tokens(fixtures_dir: Path) -> None:
    model = network(fixtures_dir, "vanilla")
    assert model.markov_head is not None
    kept = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 20, 30])
    model.draft_to_target = kept
    model.markov_head.markov_w2 = torch.nn.Linear(model.markov_head.rank, len(kept), bias=False)
    start_markov_head(model, chain())
    bias = bias_behind(model, 2)
    assert bias.shape == (len(kept),)
    assert int(bias[:8].argmax()) == 3


def test_networks_without_such_a_head_and_empty_corpora_are_left_alone(fixtures_dir: Path) -> None:
    for kind, sequences in (("dflash", chain()), ("vanilla", []), ("vanilla", [TrainingSequence((1, 2), 2, 0.0)])):
        model = network(fixtures_dir, kind)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        start_markov_head(model, sequences)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_start_is_the_same_for_the_same_seed_and_scaled_by_its_strength(fixtures_dir: Path) -> None:
    first, second = network(fixtures_dir, "vanilla"), network(fixtures_dir, "vanilla")
    start_markov_head(first, chain(), seed=5)
    start_markov_head(second, chain(), seed=5)
    assert torch.equal(bias_behind(first, 1)[:NUM_TOKENS], bias_behind(second, 1)[:NUM_TOKENS])
    assert 0 < STRENGTH <= 1
    assert float(bias_behind(first, 1)[2]) == pytest.approx(STRENGTH * np.log(0.8 * NUM_TOKENS), abs=0.6)
