"""The prefix scheduler against brute force, its tie and prefix rules, and that no decision looks ahead."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from dspark_ray.algorithm.cost_table import CostTable
from dspark_ray.algorithm.prefix_scheduler import (
    PrefixScheduler,
    admit_top,
    algorithm1,
    complete_survival,
    static_lens,
    threshold_lens,
    unconstrained_budget,
)
from dspark_ray.algorithm.proposal import survival
from dspark_ray.config import Policy
from dspark_ray.errors import ConfigError

SMOOTH = CostTable((1, 8, 16, 64), (1.0, 1.4, 2.4, 9.0), draft_seconds=0.1)
CLIFFS = CostTable((1, 4, 5, 8, 9, 12, 13, 40), (1.0, 1.0, 1.9, 1.9, 2.2, 2.2, 4.0, 4.1))
FLAT = CostTable((1, 100), (1.0, 1.0))
TABLES = [SMOOTH, CLIFFS, FLAT]


def full(requests: int, count: int) -> np.ndarray:
    return np.full(requests, count, dtype=np.int64)


def random_survival(rng: np.random.Generator, requests: int, count: int, ties: bool = False) -> np.ndarray:
    confidences = rng.choice([0.0, 0.5, 1.0], (requests, count)) if ties else rng.random((requests, count)) ** 0.4
    return survival(confidences)


def throughput(lens: np.ndarray, a: np.ndarray, cost: CostTable, extra: int = 0) -> float:
    """Theta of the paper for given lengths."""
    accepts = len(a) + sum(float(a[r, :length].sum(dtype=np.float64)) for r, length in enumerate(lens))
    return accepts * cost.steps_per_second(int(len(a) + extra + lens.sum()))


def algorithm1_as_printed(a: np.ndarray, max_drafts: np.ndarray, cost: CostTable, extra: int) -> list[int]:
    requests = len(a)
    candidates = [(r, j) for r in range(requests) for j in range(max_drafts[r]) if a[r, j] > 0]
    candidates.sort(key=lambda e: (-a[e], e[1], e[0]))
    lens, best_lens, batch, accepts = [0] * requests, [0] * requests, requests + extra, float(requests)
    best = accepts * cost.steps_per_second(batch)
    for r, j in candidates:
        lens[r], batch, accepts = j + 1, batch + 1, accepts + float(a[r, j])
        theta = accepts * cost.steps_per_second(batch)
        if theta <= best:
            break
        best, best_lens = theta, list(lens)
    return best_lens


@pytest.mark.parametrize("cost", TABLES)
@pytest.mark.parametrize("ties", [False, True])
def test_algorithm1_equals_its_printed_loop(cost: CostTable, ties: bool) -> None:
    rng = np.random.default_rng(0)
    for _ in range(150):
        requests, count, extra = int(rng.integers(1, 6)), int(rng.integers(1, 8)), int(rng.integers(0, 9))
        a, limit = random_survival(rng, requests, count, ties), rng.integers(0, count + 1, requests)
        assert algorithm1(a, limit, cost, extra).tolist() == algorithm1_as_printed(a, limit, cost, extra)


@pytest.mark.parametrize("cost", TABLES)
def test_the_unconstrained_budget_reaches_the_best_throughput_of_all_lengths(cost: CostTable) -> None:
    rng = np.random.default_rng(1)
    for _ in range(60):
        requests, count, extra = int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(0, 5))
        a = random_survival(rng, requests, count)
        budget = unconstrained_budget(a, cost, requests + extra, requests)
        lens = admit_top(a, full(requests, count), budget)
        assert lens.sum() == budget
        best = max(throughput(np.array(c), a, cost, extra) for c in product(range(count + 1), repeat=requests))
        assert throughput(lens, a, cost, extra) == pytest.approx(best, rel=1e-6)


def test_the_budget_jumps_a_cliff_where_algorithm1_stops() -> None:
    a = survival(np.full((4, 4), 0.95))
    assert algorithm1(a, full(4, 4), CLIFFS).sum() == 0  # the fifth token costs 0.9 s and brings 0.95
    assert unconstrained_budget(a, CLIFFS, 4, 4.0) == 8


def test_more_requests_mean_shorter_verification_of_each() -> None:
    a = survival(np.full((64, 7), 0.8))
    lengths = [unconstrained_budget(a[:r], SMOOTH, r, r) / r for r in (1, 4, 16, 64)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 2 * lengths[-1]


def test_admission_totals_prefixes_and_limits_hold() -> None:
    rng = np.random.default_rng(2)
    for trial in range(200):
        requests, count = int(rng.integers(1, 9)), int(rng.integers(1, 8))
        a, limit = random_survival(rng, requests, count, ties=trial % 2 == 0), rng.integers(0, count + 1, requests)
        alive = int((a * (np.arange(count) < limit[:, None]) > 0).sum())
        budget = int(rng.integers(0, requests * count + 3))
        lens = admit_top(a, limit, budget)
        assert lens.sum() == min(budget, alive)
        assert (lens <= limit).all()
        admitted = np.arange(count) < lens[:, None]
        left_out = ~admitted & (np.arange(count) < limit[:, None])
        if admitted.any() and left_out.any():
            assert a[admitted].min() >= a[left_out].max(), "nothing better is left out"


def test_ties_break_by_position_then_request() -> None:
    a = np.full((3, 3), 0.5, dtype=np.float32)
    assert [admit_top(a, full(3, 3), b).tolist() for b in (1, 2, 4, 8)] == [[1, 0, 0], [1, 1, 0], [2, 1, 1], [3, 3, 2]]


def test_a_live_confidence_moves_the_allocation_but_not_the_total() -> None:
    a = survival(np.full((4, 3), 0.6))
    before = admit_top(a, full(4, 3), 5)
    a[3] = survival(np.array([0.99, 0.99, 0.99]))
    after = admit_top(a, full(4, 3), 5)
    assert after.tolist() != before.tolist()
    assert after.sum() == before.sum() == 5


def test_nan_confidence_counts_as_zero_everywhere() -> None:
    a = np.array([[0.9, np.nan, 0.9], [0.8, 0.7, 0.6]], dtype=np.float32)
    assert admit_top(a, full(2, 3), 6).tolist() == [1, 3]
    assert algorithm1(a, full(2, 3), CostTable((1, 100), (1.0, 1.001))).tolist() == [1, 3]
    assert threshold_lens(a, full(2, 3), 0.1).tolist() == [1, 3]
    assert unconstrained_budget(a, CostTable((1, 100), (1.0, 1.001)), 2, 2.0) == 4


def test_threshold_is_on_the_product_of_confidences() -> None:
    a = survival(np.array([[0.9, 0.9, 0.1, 0.99]]))
    assert threshold_lens(a, full(1, 4), 0.5).tolist() == [2]
    assert threshold_lens(a, full(1, 4), 0.0).tolist() == [4]
    assert threshold_lens(a, full(1, 1), 0.5).tolist() == [1]


def test_static_lengths_stop_at_what_exists() -> None:
    assert static_lens(np.array([0, 2, 7]), 3).tolist() == [0, 2, 3]


RULES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "algorithm1 smooth": lambda a, limit: algorithm1(a, limit, SMOOTH, 3),
    "algorithm1 cliffs": lambda a, limit: algorithm1(a, limit, CLIFFS),
    "adaptive": lambda a, limit: admit_top(a, limit, 7),
    "threshold": lambda a, limit: threshold_lens(a, limit, 0.4),
    "static": lambda a, limit: static_lens(limit, 2),
}


def looks_ahead(rule: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> bool:
    """Whether changing what follows position j ever changes whether j is admitted."""
    rng = np.random.default_rng(3)
    for trial in range(400):
        confidences = rng.choice([0.2, 0.5, 0.9, 1.0], (4, 5)) if trial % 2 else rng.random((4, 5)) ** 0.3
        limit = rng.integers(0, 6, 4)
        before = rule(survival(confidences), limit)
        row, position = int(rng.integers(4)), int(rng.integers(5))
        # The token at `position` shows in the confidences of later positions only (equation 7).
        confidences[row, position + 1 :] = rng.random(4 - position) ** rng.choice([0.01, 1.0, 20.0])
        after = rule(survival(confidences), limit)
        if (before[row] > position) != (after[row] > position):
            return True
    return False


@pytest.mark.parametrize("name", RULES)
def test_what_follows_a_position_never_decides_about_it(name: str) -> None:
    assert not looks_ahead(RULES[name])


def test_a_retrospective_search_is_caught_looking_ahead() -> None:
    def retrospective(a: np.ndarray, limit: np.ndarray) -> np.ndarray:
        return admit_top(a, limit, unconstrained_budget(a, CLIFFS, len(a), len(a), limit))

    assert looks_ahead(retrospective)


@pytest.mark.parametrize("policy", ["adaptive", "algorithm1"])
def test_policies_that_need_a_cost_table_refuse_to_start_without(policy: Policy) -> None:
    with pytest.raises(ConfigError, match="cost table"):
        PrefixScheduler(policy)


def test_each_policy_gives_its_lengths() -> None:
    a = survival(np.array([[0.9, 0.9, 0.2], [0.9, 0.3, 0.9]]))
    limit = np.array([3, 2])
    assert PrefixScheduler("none").lens(a, limit).tolist() == [0, 0]
    assert PrefixScheduler("static", static_len=2).lens(a, limit).tolist() == [2, 2]
    assert PrefixScheduler("threshold", threshold=0.25).lens(a, limit).tolist() == [2, 2]
    greedy = PrefixScheduler("algorithm1", SMOOTH)
    assert greedy.lens(a, limit, prefill_tokens=4).tolist() == algorithm1(a, limit, SMOOTH, 4).tolist()
    adaptive = PrefixScheduler("adaptive", SMOOTH)
    assert adaptive.lens(a, limit, draft_budget=3).tolist() == [2, 1]
    assert adaptive.lens(a, limit).tolist() == algorithm1(a, limit, SMOOTH).tolist(), "no budget: Algorithm 1 decides"
    assert adaptive.lens(a, limit, FLAT).tolist() == algorithm1(a, limit, FLAT).tolist(), "a newer table is used"


def test_only_adaptive_has_a_budget_and_it_counts_prefill_and_limits() -> None:
    a = survival(np.full((4, 5), 0.9))
    assert PrefixScheduler("algorithm1", SMOOTH).budget(a) is None
    adaptive = PrefixScheduler("adaptive", SMOOTH)
    assert adaptive.budget(a, prefill_tokens=6) == unconstrained_budget(a, SMOOTH, 10, 4.0)
    assert adaptive.budget(a, np.array([1, 0, 0, 1])) <= 2


def test_requests_without_history_count_as_survival_one() -> None:
    a = complete_survival([None, np.array([0.5, 0.25], dtype=np.float32), np.array([0.9, 0.8, 0.7, 0.6])], 3)
    assert a.tolist() == [[1.0, 1.0, 1.0], [0.5, 0.25, 0.0], pytest.approx([0.9, 0.8, 0.7])]


def test_empty_batches_and_zero_positions_are_fine() -> None:
    for shape in ((0, 4), (3, 0)):
        a, limit = np.zeros(shape, dtype=np.float32), np.zeros(shape[0], dtype=np.int64)
        for policy in ("adaptive", "algorithm1", "static", "threshold", "none"):
            scheduler = PrefixScheduler(policy, SMOOTH)
            assert scheduler.lens(a, limit, draft_budget=2).tolist() == [0] * shape[0]
    assert PrefixScheduler("adaptive", SMOOTH).budget(np.zeros((0, 4))) == 0


def test_a_draining_batch_gets_a_budget_at_every_size() -> None:
    rng = np.random.default_rng(4)
    for requests in range(64, 0, -1):
        a = random_survival(rng, requests, 7)
        budget = unconstrained_budget(a, CLIFFS, requests, requests)
        assert admit_top(a, full(requests, 7), budget).sum() == min(budget, int((a > 0).sum()))
