"""Figures of a drafter against brute force over its drafts, one at a time."""

import numpy as np
import pytest

from dspark_ray.algorithm.calibration import expected_calibration_error
from dspark_ray.engine.recording import DraftOutcomes
from dspark_ray.training.scores import (
    RELIABILITY_BINS,
    confidence_auc,
    position_acceptance,
    reliability,
    roc_auc,
    threshold_sweep,
)

K = 4


def _outcomes(num_drafts: int, seed: int) -> DraftOutcomes:
    rng = np.random.default_rng(seed)
    admitted = rng.integers(1, K + 1, num_drafts)
    accepted = np.minimum(rng.integers(0, K + 1, num_drafts), admitted)
    return DraftOutcomes(rng.integers(0, 11, (num_drafts, K)) / 10, admitted, accepted)


def _brute_auc(scores: np.ndarray, positive: np.ndarray) -> float:
    pairs = [(a, b) for a in scores[positive] for b in scores[~positive]]
    return sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs)


@pytest.mark.parametrize("seed", range(5))
def test_auc_is_the_share_of_pairs_in_order_with_ties_counted_half(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores, positive = rng.integers(0, 5 + 20 * seed, 60) / 7, rng.random(60) < 0.3
    assert roc_auc(scores, positive) == pytest.approx(_brute_auc(scores, positive), abs=1e-12)


def test_auc_of_known_cases() -> None:
    flags = np.array([False, False, True, True])
    assert roc_auc(np.array([0.1, 0.2, 0.3, 0.4]), flags) == 1.0
    assert roc_auc(np.array([0.4, 0.3, 0.2, 0.1]), flags) == 0.0
    assert roc_auc(np.full(4, 0.5), flags) == 0.5
    assert roc_auc(np.zeros(4), np.ones(4, dtype=bool)) is None
    assert roc_auc(np.zeros(0), np.zeros(0, dtype=bool)) is None


@pytest.mark.parametrize("seed", range(3))
def test_calibration_error_and_reliability_equal_a_loop_over_bins(seed: int) -> None:
    rng = np.random.default_rng(seed)
    predicted = np.concatenate([rng.random(200), [0.0, 1.0]])
    observed = rng.random(202) < predicted**2
    error, bins = 0.0, reliability(predicted, observed)
    for index in range(RELIABILITY_BINS):
        low, high = index / RELIABILITY_BINS, (index + 1) / RELIABILITY_BINS
        inside = (predicted >= low) & ((predicted < high) | ((index == RELIABILITY_BINS - 1) & (predicted == 1.0)))
        assert bins.counts[index] == inside.sum()
        if inside.any():
            assert bins.predicted[index] == pytest.approx(predicted[inside].mean())
            assert bins.observed[index] == pytest.approx(observed[inside].mean())
            error += inside.mean() * abs(predicted[inside].mean() - observed[inside].mean())
        else:
            assert np.isnan(bins.predicted[index])
    assert expected_calibration_error(predicted, observed) == pytest.approx(error, abs=1e-12)


def test_acceptance_by_position_equals_a_count_draft_by_draft() -> None:
    outcomes = _outcomes(200, 1)
    got = position_acceptance(outcomes)
    for k in range(K):
        rows = list(zip(outcomes.admitted, outcomes.accepted, strict=True))
        judged = [accepted > k for admitted, accepted in rows if admitted > k and accepted >= k]
        admitted_here = [accepted > k for admitted, accepted in rows if admitted > k]
        assert got.judged[k] == len(judged)
        assert got.conditional[k] == pytest.approx(np.mean(judged))
        assert got.cumulative[k] == pytest.approx(np.mean(admitted_here))


def test_positions_that_no_draft_reached_are_nan() -> None:
    outcomes = DraftOutcomes(np.full((2, 3), 0.5), np.array([1, 2]), np.array([0, 1]))
    got = position_acceptance(outcomes)
    assert got.judged.tolist() == [2, 1, 0]
    assert got.conditional.tolist()[:2] == [0.5, 0.0]
    assert np.isnan(got.conditional[2])
    assert np.isnan(got.cumulative[2])


def test_confidences_are_judged_where_the_draft_was_still_alive() -> None:
    outcomes = _outcomes(120, 2)
    scores, hits = [], []
    for confidences, admitted, accepted in zip(outcomes.confidences, outcomes.admitted, outcomes.accepted, strict=True):
        for k in range(admitted):
            if k <= accepted:
                scores.append(confidences[k])
                hits.append(k < accepted)
    assert confidence_auc(outcomes) == pytest.approx(_brute_auc(np.array(scores), np.array(hits)))


def test_the_threshold_sweep_counts_what_a_cut_would_have_verified() -> None:
    outcomes = _outcomes(300, 3)
    whole = [row for row in range(300) if outcomes.admitted[row] == K]
    for point in threshold_sweep(outcomes, np.array([0.0, 0.15, 0.5, 1.1])):
        emitted = rejected = verified = 0
        for row in whole:
            survival, length = 1.0, 0
            for confidence in outcomes.confidences[row]:
                survival *= confidence
                if survival < point.threshold:
                    break
                length += 1
            kept = min(length, int(outcomes.accepted[row]))
            emitted, rejected, verified = emitted + kept + 1, rejected + length - kept, verified + length
        assert point.tokens_per_step == pytest.approx(emitted / len(whole))
        assert point.rejected_per_step == pytest.approx(rejected / len(whole))
        assert point.acceptance == (pytest.approx((verified - rejected) / verified) if verified else None)


def test_no_drafts_give_figures_and_no_warnings() -> None:
    none = np.zeros(0, dtype=np.int64)
    outcomes = DraftOutcomes(np.zeros((0, K)), none, none)
    assert np.isnan(position_acceptance(outcomes).conditional).all()
    assert confidence_auc(outcomes) is None
    assert threshold_sweep(outcomes, np.array([0.5]))[0].tokens_per_step == 1.0
