"""The pipeline against a naive sort, its extremes, and draws of the drafter."""

import numpy as np
import pytest
import torch

from dspark_ray.algorithm.sampling import (
    DraftSample,
    full_log_mass,
    largest,
    process_candidates,
    process_logits,
    sample_draft,
)
from dspark_ray.algorithm.verification import verify
from tests.algorithm.helpers import LEAST_P_VALUE, concat_columns, make_columns, p_value


def naive_distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Sort the whole vocabulary of one row: temperature, top-k, top-p, min-p."""
    if temperature == 0.0:
        return (np.arange(len(logits)) == np.argmax(logits)).astype(np.float64)
    scores = (logits.astype(np.float64) - logits.max()) / temperature
    order = np.argsort(-scores, kind="stable")
    kept = np.ones(len(logits), dtype=bool)
    if top_k > 0:
        kept[order[top_k:]] = False
    probs = np.where(kept, np.exp(scores), 0.0)
    probs /= probs.sum()
    if top_p < 1.0:
        before = np.concatenate([[0.0], np.cumsum(probs[order])[:-1]])
        probs[order[before >= top_p]] = 0.0
        probs /= probs.sum()
    probs[probs < min_p * probs.max()] = 0.0
    return probs / probs.sum()


@pytest.mark.parametrize("vocabulary", [50, 2000, 32_768])
@pytest.mark.parametrize("sharpness", [0.5, 4.0])
def test_every_mix_of_filters_equals_a_full_sort(vocabulary: int, sharpness: float) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    rows = [
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 0.9, 0.0),
        (1.3, 40, 1.0, 0.0),
        (1.0, 20, 0.8, 0.0),
        (0.5, 0, 1.0, 0.1),
        (2.0, 45, 0.95, 0.02),
        (0.0, 5, 0.5, 0.5),
        (1.0, 1, 1.0, 0.0),
        (1.0, 10**6, 0.999, 0.0),
        (3.0, 0, 1e-6, 0.0),
        (1.0, 0, 1.0, 1.0),
    ]
    logits = sharpness * torch.randn(len(rows), vocabulary, generator=generator)
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    got = process_logits(logits, *columns).exp().numpy()
    for row, settings in enumerate(rows):
        expected = naive_distribution(logits[row].numpy(), *settings)
        # float32 may put the edge of a nucleus one token off, where a token weighs as little as the rounding.
        assert np.maximum(got[row], expected)[(got[row] > 0) != (expected > 0)].sum() < 1e-5, settings
        assert np.allclose(got[row], expected, atol=1e-6), settings


def test_each_row_is_the_same_alone_and_in_a_batch() -> None:
    logits = torch.randn(4, 4096, generator=torch.Generator().manual_seed(0))
    settings = (
        np.array([0.5, 1.0, 0.0, 2.0]),
        np.array([0, 7, 0, 0]),
        np.array([0.9, 1, 1, 1]),
        np.array([0, 0, 0, 0.1]),
    )
    together = process_logits(logits, *settings)
    for row in range(4):
        alone = process_logits(logits[row : row + 1], *(column[row : row + 1] for column in settings))
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("temperature", [1e-6, 1e-4, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tiny_temperatures_with_huge_logits_are_argmax(temperature: float, dtype: torch.dtype) -> None:
    logits = torch.randn(3, 512, generator=torch.Generator().manual_seed(1)).mul(3e3)
    logits[0, 17], logits[1, 500], logits[2, 0] = 1e4, 1.1e4, 1.2e4
    one = np.ones(3)
    probs = process_logits(logits.to(dtype), temperature * one, 0 * one, one, 0 * one).exp()
    assert torch.isfinite(probs).all()
    assert probs.argmax(-1).tolist() == [17, 500, 0]
    assert torch.allclose(probs.amax(-1), torch.ones(3))


def test_greedy_is_one_hot_on_the_lowest_id_among_ties() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    zero, one = np.zeros(2), np.ones(2)
    assert process_logits(logits, zero, zero, one, zero).exp().tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]


def test_masked_tokens_stay_excluded_and_bad_rows_stay_alone() -> None:
    logits = torch.tensor([[1.0, -torch.inf, 0.0], [torch.nan, 0.0, 0.0], [torch.inf, 0.0, 0.0], [-torch.inf] * 3])
    logits = torch.cat([logits, logits[:1]])
    for temperature in (1.0, 0.0):
        result = process_logits(logits, np.full(5, temperature), np.full(5, 2), np.full(5, 0.9), np.full(5, 0.01))
        assert result[0, 1] == -torch.inf
        assert torch.equal(result[0], result[4])
        assert torch.isnan(result[1:4]).any(-1).all()


@pytest.mark.parametrize(("width", "k"), [(64 * 300, 64), (64 * 300, 128), (1000, 64), (64, 64), (100, 1)])
def test_largest_equals_topk(width: int, k: int) -> None:
    values = torch.randn(5, width, generator=torch.Generator().manual_seed(2))
    top, where = largest(values, k)
    assert torch.equal(top, values.topk(k).values)
    assert torch.equal(values.gather(1, where), top)


def test_candidates_with_the_full_mass_keep_the_nucleus_of_the_full_vocabulary() -> None:
    logits = 3 * torch.randn(6, 5000, generator=torch.Generator().manual_seed(3))
    temperature, off = np.full(6, 0.8), np.zeros(6)
    top_p = np.full(6, 0.6)
    full = process_logits(logits, temperature, off, top_p, off).exp()
    values, ids = logits.topk(1024)
    q = process_candidates(values, temperature, off, top_p, off, full_log_mass(logits, temperature))
    assert torch.allclose(q, full.gather(1, ids), atol=1e-6)
    assert torch.allclose(q.sum(-1), torch.ones(6), atol=1e-5)


def test_drafts_are_drawn_from_exactly_the_q_that_is_shipped() -> None:
    rows, vocabulary = 100_000, 12
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(4)).expand(rows, -1)
    generator = torch.Generator().manual_seed(5)
    columns = make_columns(rows, temperature=1.5, top_p=0.97, min_p=0.01)
    sample = sample_draft(logits, columns, np.zeros(rows), generator, k=6)
    assert sample.q_ids.shape == sample.q_probs.shape == (rows, 6)
    assert sample.q_probs.dtype == torch.float32
    q = torch.zeros(vocabulary).scatter_(0, sample.q_ids[0], sample.q_probs[0])
    assert p_value(sample.tokens.numpy(), q.numpy()) > LEAST_P_VALUE
    assert torch.equal(sample.top_prob, sample.q_probs.amax(-1))


def test_drafts_follow_the_temperature() -> None:
    logits = torch.tensor([[0.3, 0.2, 0.1, 0.0]]).expand(200, -1)
    sample = sample_draft(logits, make_columns(200, temperature=2.0), np.zeros(200), torch.Generator().manual_seed(0))
    assert len(set(sample.tokens.tolist())) == 4


def test_coupled_drafts_with_q_equal_to_p_are_the_targets_own_choice() -> None:
    rows = 2000
    logits = 2 * torch.randn(rows, 200, generator=torch.Generator().manual_seed(6))
    columns = make_columns(rows, temperature=0.9, top_p=0.95, coupled=True)
    anchors = np.arange(rows)
    draft = sample_draft(logits, columns, anchors + 1, torch.Generator().manual_seed(0), k=200)
    none = np.zeros(rows, dtype=np.int64)
    target = verify(logits, np.zeros((rows, 0)), none, None, None, columns, anchors, 0).tokens[:, 0]
    assert (draft.tokens.numpy() == target).all()
    truncated = sample_draft(logits, columns, anchors + 1, torch.Generator().manual_seed(0), k=32)
    assert (truncated.tokens.numpy() == target).mean() > 0.85


def test_confidence_is_the_top_probability_whatever_token_is_drawn() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(7)).expand(64, -1)
    sample = sample_draft(logits, make_columns(64), np.arange(64), torch.Generator().manual_seed(1))
    assert len(set(sample.tokens.tolist())) > 5
    assert len(set(sample.top_prob.tolist())) == 1
    greedy = make_columns(64, temperature=0.0, top_p=0.1, top_k=2)
    mixed = concat_columns(greedy.select(np.arange(32)), make_columns(32))
    for columns in (greedy, mixed):
        top_prob = sample_draft(logits, columns, np.arange(64), torch.Generator().manual_seed(1)).top_prob
        assert torch.allclose(top_prob, logits.softmax(-1).amax(-1))


@pytest.mark.parametrize("top_k", [0, 5, 32])
def test_q_keeps_the_nucleus_that_the_target_keeps(top_k: int) -> None:
    logits = 2 * torch.randn(2, 4096, generator=torch.Generator().manual_seed(10))
    columns = make_columns(2, temperature=0.7, top_p=0.5, top_k=top_k)
    sample = sample_draft(logits, columns, np.zeros(2), torch.Generator().manual_seed(0), k=32)
    p = process_logits(logits, columns.temperature, columns.top_k, columns.top_p, columns.min_p).exp()
    kept = p.gather(1, sample.q_ids)
    assert ((sample.q_probs > 0) == (kept > 0)).all()
    assert torch.allclose(sample.q_probs, kept / kept.sum(-1, keepdim=True), atol=1e-6)


def test_mixed_drafts_equal_separate_ones_and_greedy_is_argmax() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(8))
    logits[0, 7] = logits[0, 250] = 9.0
    greedy, coupled = make_columns(2, temperature=0.0), make_columns(2, temperature=0.8, coupled=True)
    mixed = sample_draft(
        logits, concat_columns(greedy, coupled, make_columns(2)), np.arange(6), torch.Generator().manual_seed(9), k=16
    )
    assert mixed.tokens[:2].tolist() == [7, int(logits[1].argmax())]
    alone = sample_draft(logits[2:4], coupled, np.array([2, 3]), torch.Generator(), k=16)
    assert torch.equal(mixed.tokens[2:4], alone.tokens)
    assert (mixed.q_ids[4:] == mixed.tokens[4:, None]).any(-1).all()


def test_drafts_over_a_pruned_vocabulary_are_those_of_the_whole_one_without_the_rest() -> None:
    rows, kept = 200, torch.tensor([40, 3, 77, 12, 5, 91, 60, 8])
    logits = 3 * torch.randn(rows, len(kept), generator=torch.Generator().manual_seed(12))
    whole = torch.full((rows, 100), -torch.inf)
    whole[:, kept] = logits
    greedy, coupled = make_columns(60, temperature=0.0), make_columns(60, temperature=0.8, top_p=0.9, coupled=True)
    columns = concat_columns(greedy, coupled, make_columns(80, temperature=1.3, top_p=0.8))

    def drawn(scores: torch.Tensor, vocabulary: torch.Tensor | None) -> DraftSample:
        return sample_draft(scores, columns, np.arange(rows), torch.Generator().manual_seed(1), 4, vocabulary)

    pruned, full = drawn(logits, kept), drawn(whole, None)
    assert torch.equal(pruned.tokens, full.tokens)
    assert torch.equal(pruned.q_ids, full.q_ids)
    assert torch.allclose(pruned.q_probs, full.q_probs)
    all_greedy = make_columns(rows, temperature=0.0)
    alone = sample_draft(logits, all_greedy, np.arange(rows), torch.Generator(), 4, kept)
    assert torch.equal(alone.tokens, whole.argmax(-1))
    assert torch.allclose(alone.top_prob, logits.softmax(-1).amax(-1))


def test_unseeded_drafts_of_one_generator_differ_from_call_to_call() -> None:
    logits, generator = torch.zeros(1, 1000), torch.Generator().manual_seed(0)
    tokens = {int(sample_draft(logits, make_columns(1), np.zeros(1), generator).tokens) for _ in range(20)}
    assert len(tokens) > 15


def test_draft_logits_that_are_not_finite_give_some_draft() -> None:
    logits = torch.zeros(3, 100)
    logits[0] = torch.nan
    logits[1, 5] = torch.inf
    for columns in (make_columns(3), make_columns(3, coupled=True, top_p=0.5), make_columns(3, temperature=0.0)):
        sample = sample_draft(logits, columns, np.zeros(3), torch.Generator().manual_seed(0), k=8)
        assert ((sample.tokens >= 0) & (sample.tokens < 100)).all()
        assert torch.isfinite(sample.q_probs).all()
