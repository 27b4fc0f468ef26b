"""The theorem: whatever is drafted and however admission is decided, the emitted tokens follow the target (2.1, 3.2.2).

A Markov target and drafter over V = 8: p1, q1 for the first token, p2[x], q2[x] for the second. Each test generates
the first two tokens of many requests, in one round or two, and compares them jointly with the target by chi-square.
"""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch

from dspark_ray.algorithm.cost_table import CostTable
from dspark_ray.algorithm.prefix_scheduler import admit_top, algorithm1, threshold_lens, unconstrained_budget
from dspark_ray.algorithm.proposal import survival
from dspark_ray.algorithm.sampling import process_logits, sample_draft
from dspark_ray.algorithm.verification import verify
from tests.algorithm.helpers import LEAST_P_VALUE, make_columns, p_value, random_distributions

V = 8
DRAWS = 100_000
P1, P2 = random_distributions(1, V, seed=1)[0], random_distributions(V, V, seed=2)
Q1, Q2 = random_distributions(1, V, seed=3)[0], random_distributions(V, V, seed=4)
P3 = random_distributions(V, V, seed=5)
CLIFF = CostTable((1, 2, 3), (1.0, 2.0, 1 / 0.45))  # Appendix A: SPS(1) = 1, SPS(2) = 0.5, SPS(3) = 0.45
GENTLE = CostTable((1, 2, 3), (1.0, 1.3, 1.7))
# c_2 depends on the first draft token, as the Markov confidence head's does.
CONFIDENCES = np.array([[0.8, 0.95 if x in (0, 3, 6) else 0.02] for x in range(V)], dtype=np.float32)

Admission = Callable[[np.ndarray], np.ndarray]  # first draft token [R] -> verify_lens [R]


def admit_all(x1: np.ndarray) -> np.ndarray:
    return np.full(len(x1), 2)


def by_first_token(lens_of: Callable[[np.ndarray], np.ndarray]) -> Admission:
    """A schedule of one request depends on its draft through x_1 alone: evaluate it once a value."""
    table = np.array([int(lens_of(survival(CONFIDENCES[x : x + 1]))[0]) for x in range(V)])
    return lambda x1: table[x1]


def first_two_tokens(
    admit: Admission,
    k: int = V,
    q1: torch.Tensor = Q1,
    q2: torch.Tensor = Q2,
    p1: torch.Tensor = P1,
    seeds: str = "own",
) -> np.ndarray:  # [R, 2]
    """Draft, admit, verify; requests that emitted one token go through a second round."""
    rows = np.arange(DRAWS)
    columns = make_columns(DRAWS, seeds=rows if seeds == "own" else np.full(DRAWS, 7))
    # Where all requests share a seed, noise must come from positions and rounds alone.
    anchors = np.zeros(DRAWS, dtype=np.int64) if seeds == "own" else 10 * (rows % 2)
    rounds = np.full(DRAWS, 3) if seeds == "own" else rows // 2
    generator = torch.Generator().manual_seed(11)
    draft1 = sample_draft(q1.log().expand(DRAWS, -1), columns, anchors + 1, generator, k)
    draft2 = sample_draft(q2.log()[draft1.tokens], columns, anchors + 2, generator, k)
    tokens = torch.stack([draft1.tokens, draft2.tokens], dim=1)
    q_ids = torch.stack([draft1.q_ids, draft2.q_ids], dim=1)
    q_probs = torch.stack([draft1.q_probs, draft2.q_probs], dim=1)
    lens = admit(draft1.tokens.numpy())
    scored = torch.stack([p1.log().expand(DRAWS, -1), P2.log()[tokens[:, 0]], P3.log()[tokens[:, 1]]], dim=1)
    packed = scored[torch.arange(3)[None, :] <= torch.from_numpy(lens)[:, None]]
    verdict = verify(packed, tokens, lens, q_ids, q_probs, columns, anchors, rounds)
    output = verdict.tokens[:, :2].copy()
    short = np.flatnonzero(verdict.num_accepted == 0)
    again = columns.select(short)
    anchor = torch.from_numpy(output[short, 0])
    draft = sample_draft(q2.log()[anchor], again, anchors[short] + 2, generator, k)
    second = verify(
        torch.stack([P2.log()[anchor], P3.log()[draft.tokens]], dim=1).view(-1, V),
        draft.tokens[:, None],
        np.ones(len(short), dtype=np.int64),
        draft.q_ids[:, None],
        draft.q_probs[:, None],
        again,
        anchors[short] + 1,
        rounds[short] + DRAWS,
    )
    output[short, 1] = second.tokens[:, 0]
    return output


def assert_lossless(output: np.ndarray, p1: torch.Tensor = P1) -> None:
    joint = (p1[:, None] * P2).ravel().numpy()
    assert p_value(output[:, 0], p1.numpy()) > LEAST_P_VALUE
    assert p_value(output[:, 0] * V + output[:, 1], joint) > LEAST_P_VALUE


@pytest.mark.parametrize("k", [V, 4, 1])
def test_the_first_two_tokens_follow_the_target_with_full_and_truncated_q(k: int) -> None:
    assert_lossless(first_two_tokens(admit_all, k))


def test_noise_from_positions_and_rounds_of_one_seed_is_enough() -> None:
    assert_lossless(first_two_tokens(admit_all, seeds="shared"))


def test_q_disjoint_from_p_is_always_rejected_and_lossless() -> None:
    even, odd = torch.arange(V) % 2 == 0, torch.arange(V) % 2 == 1
    p1 = torch.where(even, P1, 0.0) / P1[even].sum()
    q1 = torch.where(odd, Q1, 0.0) / Q1[odd].sum()
    assert_lossless(first_two_tokens(admit_all, q1=q1, p1=p1), p1)


def test_q_equal_to_p_is_always_accepted_and_lossless() -> None:
    columns = make_columns(DRAWS)
    generator = torch.Generator().manual_seed(1)
    draft = sample_draft(P1.log().expand(DRAWS, -1), columns, np.ones(DRAWS), generator)
    logits = torch.stack([P1.log().expand(DRAWS, -1), P2.log()[draft.tokens]], dim=1).view(-1, V)
    ones = np.ones(DRAWS, dtype=np.int64)
    q = draft.q_ids[:, None], draft.q_probs[:, None]
    verdict = verify(logits, draft.tokens[:, None], ones, *q, columns, 0 * ones, 0)
    assert verdict.num_accepted.mean() > 0.9999
    assert_lossless(verdict.tokens)


@pytest.mark.parametrize("absent", ["none", "zeros", "nan"])
def test_a_draft_without_q_is_lossless_however_it_was_chosen(absent: str) -> None:
    columns, ones = make_columns(DRAWS), np.ones(DRAWS, dtype=np.int64)
    draft = torch.full((DRAWS, 1), int(P1.argmax()))
    logits = torch.stack([P1.log().expand(DRAWS, -1), P2.log()[draft[:, 0]]], dim=1).view(-1, V)
    q_ids = None if absent == "none" else torch.arange(3).expand(DRAWS, 1, -1)
    q_probs = None if absent == "none" else torch.full((DRAWS, 1, 3), torch.nan if absent == "nan" else 0.0)
    verdict = verify(logits, draft, ones, q_ids, q_probs, columns, 0 * ones, 0)
    assert p_value(verdict.tokens[:, 0], P1.numpy()) > LEAST_P_VALUE
    assert abs(verdict.num_accepted.mean() - float(P1.max())) < 0.01


def test_processed_distributions_stay_exact() -> None:
    rows, settings = DRAWS, {"temperature": 1.7, "top_k": 6, "top_p": 0.9, "min_p": 0.05}
    columns = make_columns(rows, **settings)
    generator = torch.Generator().manual_seed(3)
    draft = sample_draft(Q1.log().expand(rows, -1), columns, np.ones(rows), generator, k=5)
    p = process_logits(P1.log()[None], *(np.array([value]) for value in settings.values())).exp()[0]
    logits = torch.stack([P1.log().expand(rows, -1), P2.log()[draft.tokens]], dim=1).view(-1, V)
    ones = np.ones(rows, dtype=np.int64)
    verdict = verify(
        logits, draft.tokens[:, None], ones, draft.q_ids[:, None], draft.q_probs[:, None], columns, 0 * ones, 0
    )
    assert (p == 0).any()
    assert p_value(verdict.tokens[:, 0], p.numpy()) > LEAST_P_VALUE


@pytest.mark.parametrize("cost", [CLIFF, GENTLE])
def test_algorithm1_is_lossless_with_confidences_that_depend_on_the_draft(cost: CostTable) -> None:
    assert_lossless(first_two_tokens(by_first_token(lambda a: algorithm1(a, np.array([2]), cost))))


def test_these_tests_would_notice_a_retrospective_search() -> None:
    biased = by_first_token(lambda a: np.array([unconstrained_budget(a, CLIFF, 1, 1.0)]))
    assert p_value(first_two_tokens(biased)[:, 0], P1.numpy()) < 1e-9


def test_algorithm1_is_lossless_over_one_large_batch() -> None:
    wide = CostTable((1, DRAWS, 2 * DRAWS, 3 * DRAWS), (0.5, 1.0, 1.4, 2.2))
    output = first_two_tokens(lambda x1: algorithm1(survival(CONFIDENCES[x1]), np.full(DRAWS, 2), wide))
    assert_lossless(output)


def test_adaptive_admission_with_a_lagged_budget_is_lossless() -> None:
    lagged = np.random.default_rng(0).integers(0, V, DRAWS)  # the draft of an earlier step of the same request
    budget = [unconstrained_budget(survival(CONFIDENCES[x : x + 1]), CLIFF, 1, 1.0) for x in range(V)]
    assert set(budget) == {0, 2}, "the budget itself must depend on the earlier draft"
    table = np.zeros((V, V), dtype=np.int64)
    for old, new in product(range(V), range(V)):
        table[old, new] = admit_top(survival(CONFIDENCES[new : new + 1]), np.array([2]), budget[old])[0]
    assert_lossless(first_two_tokens(lambda x1: table[lagged, x1]))


def test_adaptive_admission_over_one_large_batch_is_lossless() -> None:
    output = first_two_tokens(lambda x1: admit_top(survival(CONFIDENCES[x1]), np.full(DRAWS, 2), DRAWS + DRAWS // 5))
    assert_lossless(output)


def test_threshold_admission_is_lossless() -> None:
    assert_lossless(first_two_tokens(by_first_token(lambda a: threshold_lens(a, np.array([2]), 0.3))))


# Appendix A, with tokens A = 0 and B = 1.


def appendix_a(admit: Admission) -> float:
    """Share of A among the first tokens: 0.7 if lossless."""
    generator = torch.Generator().manual_seed(5)
    columns = make_columns(DRAWS)
    target, drafter = torch.tensor([0.7, 0.3]).log(), torch.tensor([0.5, 0.5]).log()
    draft = sample_draft(drafter.expand(DRAWS, -1), columns, np.ones(DRAWS), generator)
    lens = admit(draft.tokens.numpy())
    logits = target.expand(int((1 + lens).sum()), -1)
    q = draft.q_ids[:, None].expand(-1, 2, -1), draft.q_probs[:, None].expand(-1, 2, -1)
    verdict = verify(logits, draft.tokens[:, None].expand(-1, 2), lens, *q, columns, np.zeros(DRAWS), 0)
    return float((verdict.tokens[:, 0] == 0).mean())


def appendix_survival(x1: int) -> np.ndarray:
    return survival(np.array([[0.8, 0.9 if x1 == 0 else 0.0]], dtype=np.float32))


def test_the_biased_search_of_appendix_a_gives_085() -> None:
    def retrospective(x1: np.ndarray) -> np.ndarray:  # global argmax over the live survivals: not what we do
        lens = np.array([unconstrained_budget(appendix_survival(x), CLIFF, 1, 1.0) for x in (0, 1)])
        assert lens.tolist() == [2, 0]
        return lens[x1]

    assert appendix_a(retrospective) == pytest.approx(0.85, abs=0.005)


def test_algorithm1_gives_070_in_appendix_a() -> None:
    lens = np.array([algorithm1(appendix_survival(x), np.array([2]), CLIFF)[0] for x in (0, 1)])
    assert lens.tolist() == [0, 0], "it stops before any quantity that depends on x_1"
    assert appendix_a(lambda x1: lens[x1]) == pytest.approx(0.70, abs=0.005)


@pytest.mark.parametrize("lagged", [0, 1])
def test_adaptive_gives_070_in_appendix_a(lagged: int) -> None:
    budget = unconstrained_budget(appendix_survival(lagged), CLIFF, 1, 1.0)
    lens = np.array([admit_top(appendix_survival(x), np.array([2]), budget)[0] for x in (0, 1)])
    assert appendix_a(lambda x1: lens[x1]) == pytest.approx(0.70, abs=0.005)
