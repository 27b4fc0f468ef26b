"""Algorithm 1, the hardware-aware prefix scheduler: how many draft tokens of each request are verified.

Decides from survival probabilities, lengths and the cost table alone; it never sees a token. Every rule here is
non-anticipating (Appendix A): whether position j of a block is admitted depends on survivals up to j, on other requests
and on the past, never on what follows. Letters: R requests, K draft positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dspark_ray.algorithm.cost_table import CostTable
from dspark_ray.config import Policy
from dspark_ray.errors import ConfigError


def algorithm1(
    survival: np.ndarray,  # [R, K] a_{r,j}
    max_drafts: np.ndarray,  # [R] int64, drafts that exist and may be verified
    cost: CostTable,
    extra_tokens: int = 0,  # tokens in the step beside anchors and drafts (prefill)
) -> np.ndarray:  # [R] int64 verify_lens
    """Algorithm 1 of the paper, line by line; its loop over the sorted candidates is a prefix of array sums."""
    requests = len(survival)
    # Algorithm 1, line 2: survivals are products already; `_candidates` lays them out position-major.
    a = _candidates(survival, max_drafts)
    # Algorithm 1, line 4: descending; the stable sort breaks ties by (position, request), so prefixes stay whole.
    order = np.argsort(-a, kind="stable")
    order = order[: int(np.count_nonzero(a))]
    # Algorithm 1, lines 5 and 8: B and tau before any admission and after each.
    batch_tokens = requests + extra_tokens + np.arange(len(order) + 1)
    expected_accepts = requests + np.concatenate([[0.0], np.cumsum(a[order], dtype=np.float64)])
    # Algorithm 1, lines 6 and 9: throughput Theta along the admission path.
    throughput = expected_accepts * cost.steps_per_second(batch_tokens)
    # Algorithm 1, lines 10 to 14: stop at the first candidate that does not improve. What comes later on the path,
    # however good, must not be looked at: it depends on the tokens being decided (Appendix A).
    improves = throughput[1:] > throughput[:-1]
    admitted = len(order) if improves.all() else int(np.argmin(improves))
    # Algorithm 1, line 16.
    return _lens(order[:admitted], requests)


def unconstrained_budget(
    survival: np.ndarray,  # [R, K], of an earlier step: never of the drafts that the budget will cut
    cost: CostTable,
    base_tokens: int,  # tokens in the step without drafts: anchors and prefill
    base_accepts: float,  # tokens that these yield for certain: one an anchor
    max_drafts: np.ndarray | None = None,  # [R] int64
) -> int:
    """The draft budget of section 5.2: the global argmax of Theta over the sorted survivals, with no early stop.

    It jumps over cliffs of SPS. Exact only because the survivals lag; ties go to the smaller budget.
    """
    sorted_survival = np.sort(_candidates(survival, max_drafts))[::-1]
    expected_accepts = base_accepts + np.concatenate([[0.0], np.cumsum(sorted_survival, dtype=np.float64)])
    batch_tokens = base_tokens + np.arange(len(sorted_survival) + 1)
    return int(np.argmax(expected_accepts * cost.steps_per_second(batch_tokens)))


def admit_top(survival: np.ndarray, max_drafts: np.ndarray, budget: int) -> np.ndarray:
    """The `budget` candidates with the largest live survival, as verify_lens [R]; ties by (position, request).

    Survivals never rise along a block, so what is admitted is a prefix of each. Candidates without survival are never
    admitted. Args as for `algorithm1`.
    """
    requests = len(survival)
    a = _candidates(survival, max_drafts)
    alive = int(np.count_nonzero(a))
    budget = max(budget, 0)
    if budget >= alive:
        return _lens(np.flatnonzero(a), requests)
    if budget == 0:
        return np.zeros(requests, dtype=np.int64)
    edge = np.partition(a, len(a) - budget)[len(a) - budget]
    above = np.flatnonzero(a > edge)
    ties = np.flatnonzero(a == edge)[: budget - len(above)]
    return _lens(above, requests) + _lens(ties, requests)


def static_lens(max_drafts: np.ndarray, static_len: int) -> np.ndarray:
    """The same length for everyone, where that many drafts exist [R]."""
    return np.minimum(np.asarray(max_drafts, dtype=np.int64), static_len)


def threshold_lens(survival: np.ndarray, max_drafts: np.ndarray, threshold: float) -> np.ndarray:
    """As long as the survival (the product, not each confidence) is at least `threshold` [R]."""
    a = _candidates(survival, max_drafts, outside=-1.0).reshape(survival.shape[1], len(survival))
    return (a >= threshold).sum(axis=0, dtype=np.int64)


def complete_survival(lagged: Sequence[np.ndarray | None], num_draft_tokens: int) -> np.ndarray:
    """Lagged survivals of R requests as [R, K]: 1 for a request without history, 0 for positions past its history."""
    complete = np.zeros((len(lagged), num_draft_tokens), dtype=np.float32)
    for row, history in enumerate(lagged):
        if history is None:
            complete[row] = 1.0
        else:
            complete[row, : len(history)] = history[:num_draft_tokens]
    return complete


@dataclass(frozen=True, slots=True)
class PrefixScheduler:
    """A policy with its settings. Every rank holds one and gets the same lengths from the same numbers.

    `adaptive`: `budget` beforehand from lagged survivals, then the top of the live ones (5.2); without a budget (the
    first steps, a controller away) Algorithm 1 decides alone. Raises ConfigError where the policy needs a cost table
    and has none.
    """

    policy: Policy
    cost: CostTable | None = None
    static_len: int = 7
    threshold: float = 0.3

    def __post_init__(self) -> None:
        if self.policy in ("adaptive", "algorithm1") and self.cost is None:
            raise ConfigError(
                f"verification.policy {self.policy!r} needs a cost table: profile at start-up, set "
                "verification.cost_table, or choose policy 'static', 'threshold' or 'none'"
            )
        if self.static_len < 0:
            raise ConfigError(f"verification.static_len must be 0 or more, got {self.static_len}")
        if not 0.0 <= self.threshold <= 1.0:
            raise ConfigError(f"verification.threshold must be in [0, 1], got {self.threshold}")

    def lens(
        self,
        survival: np.ndarray,  # [R, K] live survivals
        max_drafts: np.ndarray,  # [R] int64
        cost: CostTable | None = None,  # newer than the one at construction
        prefill_tokens: int = 0,  # tokens in the step beside anchors and drafts
        draft_budget: int | None = None,
    ) -> np.ndarray:  # [R] int64
        """verify_lens of one step; every rank computes them from the same numbers."""
        match self.policy:
            case "none":
                return np.zeros(len(survival), dtype=np.int64)
            case "static":
                return static_lens(np.clip(max_drafts, 0, survival.shape[1]), self.static_len)
            case "threshold":
                return threshold_lens(survival, max_drafts, self.threshold)
            case "adaptive" if draft_budget is not None:
                return admit_top(survival, max_drafts, draft_budget)
        return algorithm1(survival, max_drafts, self._table(cost), prefill_tokens)

    def budget(
        self,
        lagged_survival: np.ndarray,  # [R, K], see `complete_survival`
        max_drafts: np.ndarray | None = None,  # [R] int64, of the step to come
        cost: CostTable | None = None,
        prefill_tokens: int = 0,
    ) -> int | None:
        """The draft budget of a later step; None for policies that decide inside the step."""
        if self.policy != "adaptive":
            return None
        requests = len(lagged_survival)
        return unconstrained_budget(lagged_survival, self._table(cost), requests + prefill_tokens, requests, max_drafts)

    def _table(self, cost: CostTable | None) -> CostTable:
        table = self.cost if cost is None else cost
        assert table is not None, "checked at construction"
        return table


def _candidates(survival: np.ndarray, max_drafts: np.ndarray | None, outside: float = 0.0) -> np.ndarray:
    """Survivals as candidates [K * R], position-major; `outside` past max_drafts.

    NaN counts as 0 (fmax ignores it), and nothing rises along a block, whatever the caller brings: prefixes rest on it.
    """
    by_position = np.minimum(np.fmax(survival.T, np.float32(0.0)), np.float32(1.0))  # [K, R]
    a = np.minimum.accumulate(by_position, axis=0)
    if max_drafts is not None:
        a = np.where(np.arange(len(a))[:, None] < max_drafts, a, a.dtype.type(outside))
    return np.ravel(a)


def _lens(admitted: np.ndarray, requests: int) -> np.ndarray:
    """Count admitted candidates (indices into the position-major layout) for each request."""
    return np.bincount(admitted % requests, minlength=requests) if requests else np.zeros(0, dtype=np.int64)
