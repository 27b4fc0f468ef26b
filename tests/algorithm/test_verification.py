"""Verification rules: what is accepted, what follows, and that no row disturbs another."""

import numpy as np
import pytest
import torch

from dspark_ray.algorithm.columns import SamplingColumns
from dspark_ray.algorithm.sampling import process_probs, sample_draft
from dspark_ray.algorithm.verification import Verdict, verify
from tests.algorithm.helpers import LEAST_P_VALUE, concat_columns, make_columns, p_value, random_distributions

GREEDY, REJECTION, COUPLED = (0.0, False), (1.0, False), (1.0, True)
MODES = [GREEDY, REJECTION, COUPLED]


def columns_of(mode: tuple[float, bool], rows: int, seed: int = 0) -> SamplingColumns:
    return make_columns(rows, temperature=mode[0], coupled=mode[1], seeds=np.arange(rows) + seed)


def point_logits(tokens: list[int], vocabulary: int = 10) -> torch.Tensor:
    """Rows that put (nearly) all mass on one token each."""
    logits = torch.full((len(tokens), vocabulary), -50.0)
    logits[torch.arange(len(tokens)), torch.tensor(tokens)] = 50.0
    return logits


def emitted(verdict: Verdict) -> list[list[int]]:
    return [row[: n + 1].tolist() for row, n in zip(verdict.tokens, verdict.num_accepted, strict=True)]


@pytest.mark.parametrize("mode", MODES)
def test_full_acceptance_emits_every_draft_and_one_bonus_token(mode: tuple[float, bool]) -> None:
    drafts = np.array([[1, 2, 3, 4]])
    verdict = verify(
        point_logits([1, 2, 3, 4, 9]), drafts, np.array([4]), None, None, columns_of(mode, 1), np.zeros(1), 0
    )
    assert emitted(verdict) == [[1, 2, 3, 4, 9]]
    assert not verdict.failed.any()


@pytest.mark.parametrize("mode", MODES)
def test_nothing_after_a_rejection_is_accepted(mode: tuple[float, bool]) -> None:
    drafts = np.array([[1, 2, 3]])
    verdict = verify(point_logits([1, 7, 3, 4]), drafts, np.array([3]), None, None, columns_of(mode, 1), np.zeros(1), 0)
    assert emitted(verdict) == [[1, 7]]


@pytest.mark.parametrize("mode", MODES)
def test_ragged_rows_in_one_batch_equal_each_row_alone(mode: tuple[float, bool]) -> None:
    lens = np.array([1, 7, 3, 0])
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(int((1 + lens).sum()), 40, generator=generator)
    drafts = torch.randint(0, 40, (4, 7), generator=generator)
    first = np.cumsum(1 + lens) - (1 + lens)
    for row, count in enumerate(lens):  # drafts that mostly agree, also at the ends
        drafts[row, :count] = logits[first[row] : first[row] + count].argmax(-1)
    columns, anchors, rounds = columns_of(mode, 4), np.array([5, 50, 7, 9]), np.array([1, 2, 3, 4])
    together = verify(logits, drafts, lens, None, None, columns, anchors, rounds)
    for row in range(4):
        one = slice(row, row + 1)
        part = logits[first[row] : first[row] + 1 + lens[row]]
        alone = verify(
            part, drafts[one], lens[one], None, None, columns.select(np.array([row])), anchors[one], rounds[one]
        )
        assert emitted(alone)[0] == emitted(together)[row]
        assert alone.num_accepted[0] <= lens[row]


def test_a_mixed_batch_equals_separate_batches() -> None:
    rows, count, vocabulary = 4, 3, 30
    generator = torch.Generator().manual_seed(1)
    parts = []
    for mode in MODES:
        target = 2 * torch.randn(rows * (count + 1), vocabulary, generator=generator)
        q = random_distributions(rows * count, vocabulary, 3).view(rows, count, vocabulary)
        drafts = target.view(rows, count + 1, vocabulary)[:, :count].argmax(-1)
        parts.append((target, drafts, q, columns_of(mode, rows, seed=17)))
    ids = torch.arange(vocabulary).expand(rows, count, -1)
    lens, anchors = np.full(rows, count), np.arange(rows)
    alone = [verify(t, d, lens, ids, q, columns, anchors, 2) for t, d, q, columns in parts]
    # Interleave the modes request by request.
    order = np.arange(3 * rows).reshape(3, rows).T.ravel()
    target = torch.cat([p[0] for p in parts]).view(3 * rows, count + 1, vocabulary)[order].reshape(-1, vocabulary)
    drafts, q = torch.cat([p[1] for p in parts])[order], torch.cat([p[2] for p in parts])[order]
    columns = concat_columns(*(p[3] for p in parts)).select(order)
    mixed = verify(target, drafts, np.tile(lens, 3), ids.repeat(3, 1, 1), q, columns, np.tile(anchors, 3)[order], 2)
    expected = np.concatenate([v.tokens for v in alone])[order]
    assert (mixed.tokens == expected).all()
    assert (mixed.num_accepted == np.concatenate([v.num_accepted for v in alone])[order]).all()
    assert 0 < mixed.num_accepted.sum() < 3 * rows * count


def test_greedy_takes_the_lowest_id_on_ties_in_the_logits_own_dtype() -> None:
    logits = torch.zeros(3, 8, dtype=torch.bfloat16)
    logits[0, [2, 5]], logits[1, [6, 7]] = 3.0, 1.0
    verdict = verify(logits, np.array([[2, 6]]), np.array([2]), None, None, columns_of(GREEDY, 1), np.zeros(1), 0)
    assert emitted(verdict) == [[2, 6, 0]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_fails_alone(mode: tuple[float, bool], poison: float) -> None:
    lens = np.array([2, 2, 2])
    logits = point_logits([1, 2, 3] * 3)
    drafts = np.array([[1, 2]] * 3)
    bad = logits.clone()
    bad[4, 0] = poison
    columns, anchors = columns_of(mode, 3), np.zeros(3)
    good = verify(logits, drafts, lens, None, None, columns, anchors, 0)
    verdict = verify(bad, drafts, lens, None, None, columns, anchors, 0)
    assert verdict.failed.tolist() == [False, True, False]
    assert emitted(verdict)[0] == emitted(good)[0]
    assert emitted(verdict)[2] == emitted(good)[2]
    assert ((verdict.tokens >= 0) & (verdict.tokens < 10)).all()


@pytest.mark.parametrize("mode", MODES)
def test_a_bad_row_behind_a_rejection_is_never_reached(mode: tuple[float, bool]) -> None:
    logits = point_logits([5, 2, 3])
    logits[1:] = torch.nan
    verdict = verify(logits, np.array([[1, 2]]), np.array([2]), None, None, columns_of(mode, 1), np.zeros(1), 0)
    assert emitted(verdict) == [[5]]
    assert not verdict.failed.any()


@pytest.mark.parametrize("mode", MODES)
def test_no_drafts_at_all_is_plain_sampling(mode: tuple[float, bool]) -> None:
    logits = point_logits([3, 4])
    columns = columns_of(mode, 2)
    without = verify(logits, np.zeros((2, 0)), np.zeros(2), None, None, columns, np.zeros(2), 0)
    assert emitted(without) == [[3], [4]]
    empty = verify(logits[:0], np.zeros((0, 3)), np.zeros(0), None, None, columns_of(mode, 0), np.zeros(0), 0)
    assert empty.tokens.shape == (0, 4)


@pytest.mark.parametrize("temperature", [1e-6, 1e-3])
@pytest.mark.parametrize("coupled", [False, True])
def test_tiny_temperatures_with_huge_logits_emit_argmax(temperature: float, coupled: bool) -> None:
    logits = torch.randn(8, 100, generator=torch.Generator().manual_seed(2)) * 1e4
    best = logits.argmax(-1)
    drafts = best.view(2, 4)[:, :3]
    columns = make_columns(2, temperature=temperature, coupled=coupled)
    verdict = verify(logits, drafts, np.full(2, 3), None, None, columns, np.zeros(2), 0)
    assert (verdict.tokens == best.view(2, 4).numpy()).all()


def coupled_generation(
    next_logits: torch.Tensor, seeds: np.ndarray, length: int, drafts_of: int, verify_len: int, seed: int
) -> np.ndarray:
    """Tokens [R, length] of a Markov target under coupled verification of arbitrary drafts."""
    rows, vocabulary = len(seeds), next_logits.shape[0]
    columns = make_columns(rows, seeds=seeds, top_p=0.95, coupled=True)
    generator = np.random.default_rng(seed)
    output, done, anchor = (
        np.zeros((rows, length + drafts_of + 1), dtype=np.int64),
        np.zeros(rows, dtype=np.int64),
        None,
    )
    step = 0
    while (done < length).any():
        step += 1
        anchor = np.where(done > 0, output[np.arange(rows), np.maximum(done - 1, 0)], 0)
        drafts = generator.integers(0, vocabulary, (rows, drafts_of))
        if seed % 2:  # every other drafter is good: it proposes what plain decoding would emit
            drafts = coupled_generation_step_by_step(next_logits, columns, anchor, done, drafts_of)
        lens = np.full(rows, verify_len)
        inputs = np.concatenate([anchor[:, None], drafts[:, :verify_len]], axis=1)
        verdict = verify(
            next_logits[torch.from_numpy(inputs.ravel())], drafts, lens, None, None, columns, done - 1, step
        )
        for row in np.flatnonzero(done < length):
            new = verdict.tokens[row, : verdict.num_accepted[row] + 1][: length + drafts_of + 1 - done[row]]
            output[row, done[row] : done[row] + len(new)] = new
            done[row] += len(new)
    return output[:, :length]


def coupled_generation_step_by_step(
    next_logits: torch.Tensor, columns: SamplingColumns, anchor: np.ndarray, done: np.ndarray, count: int
) -> np.ndarray:
    drafts = []
    for k in range(count):
        sample = sample_draft(next_logits[torch.from_numpy(anchor)], columns, done + k, torch.Generator(), k=64)
        anchor = sample.tokens.numpy()
        drafts.append(anchor)
    return np.stack(drafts, axis=1)


def test_coupled_output_is_the_same_with_any_draft_and_any_length() -> None:
    next_logits = 1.5 * torch.randn(24, 24, generator=torch.Generator().manual_seed(3))
    seeds = np.array([0, -5, 2**63 - 1, 77])
    plain = coupled_generation(next_logits, seeds, 20, drafts_of=1, verify_len=0, seed=0)
    for drafts_of, verify_len, seed in [(3, 3, 0), (3, 3, 1), (7, 5, 1), (7, 1, 2), (16, 16, 3)]:
        assert (coupled_generation(next_logits, seeds, 20, drafts_of, verify_len, seed) == plain).all()
    assert len({tuple(row) for row in plain}) == len(seeds), "another seed gives another text"


def test_coupled_tokens_follow_p_over_seeds_and_jointly_over_positions() -> None:
    rows, vocabulary = 50_000, 8
    p = random_distributions(2, vocabulary, seed=4)
    logits = p.log()[None].expand(rows, -1, -1).reshape(-1, vocabulary)
    columns = make_columns(rows, coupled=True)
    first = verify(
        logits.view(rows, 2, -1)[:, 0], np.zeros((rows, 0)), np.zeros(rows), None, None, columns, np.zeros(rows), 0
    ).tokens[:, 0]
    assert p_value(first, p[0].numpy()) > LEAST_P_VALUE
    # The draft is the first token itself: always accepted, and the bonus follows p of the next row independently.
    both = verify(logits, first[:, None], np.ones(rows), None, None, columns, np.zeros(rows), 0)
    assert (both.num_accepted == 1).all()
    pairs = both.tokens[:, 0] * vocabulary + both.tokens[:, 1]
    assert p_value(pairs, torch.outer(p[0], p[1]).ravel().numpy()) > LEAST_P_VALUE


def test_coupled_acceptance_is_high_when_q_is_near_p() -> None:
    rows, vocabulary = 5000, 100
    generator = torch.Generator().manual_seed(5)
    target = 2 * torch.randn(1, vocabulary, generator=generator).expand(rows, -1)
    drafter = target + 0.2 * torch.randn(1, vocabulary, generator=generator)
    columns = make_columns(rows, coupled=True)
    draft = sample_draft(drafter, columns, np.ones(rows), generator, k=100)
    verdict = verify(
        target.repeat_interleave(2, 0), draft.tokens[:, None], np.ones(rows), None, None, columns, np.zeros(rows), 0
    )
    overlap = float(torch.minimum(target[0].softmax(-1), drafter[0].softmax(-1)).sum())
    assert 0.8 * overlap < verdict.num_accepted.mean() <= overlap + 0.02


def test_fresh_rounds_give_fresh_noise_at_the_same_position() -> None:
    logits, columns = torch.zeros(1, 1000), make_columns(1)
    tokens = {
        int(verify(logits, np.zeros((1, 0)), np.zeros(1), None, None, columns, np.zeros(1), step).tokens[0, 0])
        for step in range(20)
    }
    assert len(tokens) > 15


@pytest.mark.parametrize("top_k", [0, 5])
def test_plain_sampling_follows_p_over_many_blocks_of_the_vocabulary(top_k: int) -> None:
    rows, vocabulary = 40_000, 300
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(6))
    logits[0, [0, 63, 64, 191, 299]] += 5.0  # the ends of blocks
    columns = make_columns(rows, top_k=top_k)
    verdict = verify(
        logits.expand(rows, -1), np.zeros((rows, 0)), np.zeros(rows), None, None, columns, np.zeros(rows), 0
    )
    one = columns.select(np.array([0]))
    p = process_probs(logits, one.temperature, one.top_k, one.top_p, one.min_p)[0].numpy()
    assert (p > 0).sum() == (top_k or vocabulary)
    assert p_value(verdict.tokens[:, 0], p) > LEAST_P_VALUE
