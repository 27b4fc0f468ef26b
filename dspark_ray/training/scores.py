"""Figures of a drafter from what became of its drafts: acceptance, discrimination, reliability. Pure functions.

Letters: S drafts, K draft positions. A position is judged if it was admitted and everything before it was accepted.
"""

from dataclasses import dataclass

import numpy as np

from dspark_ray.engine.recording import DraftOutcomes

RELIABILITY_BINS = 15


@dataclass(frozen=True, slots=True)
class PositionAcceptance:
    """Acceptance along the block; nan where nothing was judged."""

    conditional: np.ndarray  # [K] accepted, of the judged
    cumulative: np.ndarray  # [K] accepted, of the drafts admitted so far
    judged: np.ndarray  # [K] int64


def position_acceptance(outcomes: DraftOutcomes) -> PositionAcceptance:
    """The paper's Figure 2 (conditional) and its prefix product as it was seen (cumulative)."""
    positions = np.arange(outcomes.num_draft_tokens)
    accepted = (outcomes.accepted[:, None] > positions).sum(0)
    admitted = (outcomes.admitted[:, None] > positions).sum(0)
    judged = _judged(outcomes).sum(0)
    return PositionAcceptance(_ratio(accepted, judged), _ratio(accepted, admitted), judged)


def confidence_auc(outcomes: DraftOutcomes) -> float | None:
    """ROC-AUC of the conditional confidences over all judged positions; None where all of them went one way."""
    judged = _judged(outcomes)
    hits = np.arange(outcomes.num_draft_tokens) < outcomes.accepted[:, None]
    return roc_auc(outcomes.confidences[judged], hits[judged])


def roc_auc(scores: np.ndarray, positive: np.ndarray) -> float | None:
    """P(a positive scores higher than a negative), ties counted half (Hanley and McNeil, 1982). Args: [N] each."""
    num_positive, num_negative = int(positive.sum()), int((~positive).sum())
    if not num_positive or not num_negative:
        return None
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    rank_sum = ranks[inverse][positive].sum()
    return float((rank_sum - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative))


@dataclass(frozen=True, slots=True)
class ThresholdPoint:
    """What a static threshold on the survival would have verified (the paper's Figure 5)."""

    threshold: float
    tokens_per_step: float  # emitted, bonus included
    rejected_per_step: float  # verified in vain
    acceptance: float | None  # accepted, of the admitted


def threshold_sweep(outcomes: DraftOutcomes, thresholds: np.ndarray) -> list[ThresholdPoint]:
    """From drafts verified in full: cutting a draft earlier changes nothing of what comes before the cut."""
    complete = outcomes.complete()
    survival = np.cumprod(complete.confidences, axis=1)
    points = []
    for threshold in thresholds:
        lengths = (survival >= threshold).sum(1)
        accepted = np.minimum(complete.accepted, lengths)
        admitted = int(lengths.sum())
        steps = max(1, len(complete))
        points.append(
            ThresholdPoint(
                float(threshold),
                1 + float(accepted.sum()) / steps,
                float(admitted - accepted.sum()) / steps,
                float(accepted.sum()) / admitted if admitted else None,
            )
        )
    return points


@dataclass(frozen=True, slots=True)
class Reliability:
    """Predicted against observed survival in equal bins; empty bins are nan (the paper's Figure 6)."""

    predicted: np.ndarray  # [bins]
    observed: np.ndarray  # [bins]
    counts: np.ndarray  # [bins] int64


def reliability(predicted: np.ndarray, observed: np.ndarray, bins: int = RELIABILITY_BINS) -> Reliability:
    """Args: predicted [S] in [0, 1]; observed [S] bool."""
    bucket = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    counts = np.bincount(bucket, minlength=bins)
    predicted_sum = np.bincount(bucket, weights=predicted, minlength=bins)
    observed_sum = np.bincount(bucket, weights=observed.astype(np.float64), minlength=bins)
    return Reliability(_ratio(predicted_sum, counts), _ratio(observed_sum, counts), counts)


def _judged(outcomes: DraftOutcomes) -> np.ndarray:  # [S, K] bool
    reached = np.minimum(outcomes.accepted + 1, outcomes.admitted)
    judged: np.ndarray = np.arange(outcomes.num_draft_tokens) < reached[:, None]
    return judged


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    return np.where(denominator > 0, numerator / np.maximum(denominator, 1), np.nan)
