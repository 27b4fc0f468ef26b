"""ClusterPlanner without Ray: registration, expiry, leases, budgets, epochs, saturation, totals."""

import json
from dataclasses import replace

import numpy as np
import pytest

from dspark_ray.algorithm.cost_table import CostTable
from dspark_ray.algorithm.prefix_scheduler import unconstrained_budget
from dspark_ray.engine.draft_budget import LoadReport
from dspark_ray.workers.cluster_planner import (
    EXPIRY_SECONDS,
    REBALANCE_SECONDS,
    ClusterPlanner,
    budget_for,
    rest_threshold,
)

FLAT = CostTable((1, 8, 16), (0.01, 0.01, 0.05))  # eight tokens cost what one costs; then it is steep
K = 4


def make_report(survival: list[list[float]], step: int = 1, **fields: object) -> LoadReport:
    rows = np.array(survival, dtype=np.float32).reshape(-1, K)
    report = LoadReport(
        step=step,
        num_running=len(rows),
        num_waiting=0,
        base_tokens=len(rows),
        batch_tokens=len(rows),
        num_sampling=len(rows),
        survival=rows,
        max_drafts=np.full(len(rows), K),
        step_seconds=0.01,
        draft_seconds=0.002,
        drafted=4,
        admitted=3,
        accepted=2,
        emitted=3,
    )
    return replace(report, **fields)  # type: ignore[arg-type]


def planner_with(groups: int, drafters: int, now: float = 0.0) -> ClusterPlanner:
    planner = ClusterPlanner()
    for index in range(groups):
        assert planner.register_target(f"g{index}", 1, FLAT, K, now)
    for index in range(drafters):
        planner.heartbeat_drafter(f"d{index}", 16, 0.5, now)
    return planner


def test_each_group_leases_its_own_drafter() -> None:
    planner = planner_with(2, 2)
    first, second = planner.lease("g0", 0.0).drafter_ids, planner.lease("g1", 0.0).drafter_ids
    assert len(first) == len(second) == 1
    assert first != second


def test_an_unknown_group_leases_nothing() -> None:
    assert planner_with(1, 1).lease("stranger", 0.0).drafter_ids == ()


def test_a_drafter_that_falls_silent_loses_its_lease() -> None:
    planner = planner_with(1, 2)
    assert len(planner.lease("g0", 0.0).drafter_ids) == 2
    planner.heartbeat_drafter("d1", 16, 0.5, EXPIRY_SECONDS)
    planner.register_target("g0", 1, FLAT, K, EXPIRY_SECONDS)
    assert planner.lease("g0", EXPIRY_SECONDS + 0.1).drafter_ids == ("d1",)


def test_a_drafter_seen_dead_loses_its_lease_at_once_and_returns_when_heard_of() -> None:
    planner = planner_with(1, 2)
    planner.remove_drafter("d0")
    assert planner.lease("g0", 0.0).drafter_ids == ("d1",)
    planner.heartbeat_drafter("d0", 16, 0.0, 0.1)
    assert set(planner.lease("g0", 0.1).drafter_ids) == {"d0", "d1"}


def test_a_group_that_falls_silent_frees_its_drafters() -> None:
    planner = planner_with(2, 2)
    planner.lease("g0", 0.0)
    late = EXPIRY_SECONDS + 1
    planner.register_target("g0", 1, FLAT, K, late)
    for drafter_id in ("d0", "d1"):
        planner.heartbeat_drafter(drafter_id, 16, 0.5, late)
    assert set(planner.lease("g0", late).drafter_ids) == {"d0", "d1"}
    assert "g1" not in planner.stats(late)["groups"]


def test_a_group_that_leaves_frees_its_drafters() -> None:
    planner = planner_with(2, 2)
    planner.lease("g0", 0.0)
    planner.remove_target("g1")
    assert len(planner.lease("g0", 0.0).drafter_ids) == 2


def test_leases_follow_load_but_not_at_every_report() -> None:
    planner = planner_with(2, 4)
    assert len(planner.lease("g0", 0.0).drafter_ids) == 2
    planner.report("g0", 1, make_report([], num_running=90), 1.0)
    planner.report("g1", 1, make_report([], num_running=3), 1.0)
    assert len(planner.lease("g0", 1.0).drafter_ids) == 2
    for drafter_id in ("d0", "d1", "d2", "d3"):
        planner.heartbeat_drafter(drafter_id, 16, 0.5, REBALANCE_SECONDS)
    assert len(planner.lease("g0", REBALANCE_SECONDS).drafter_ids) == 3
    assert len(planner.lease("g1", REBALANCE_SECONDS).drafter_ids) == 1


def test_a_budget_is_the_argmax_over_the_reported_survivals() -> None:
    survival = [[0.9, 0.8, 0.7, 0.1], [0.5, 0.4, 0.02, 0.01]]
    reply = planner_with(1, 1).report("g0", 1, make_report(survival, step=7), 0.0)
    assert reply is not None
    assert (reply.group, reply.epoch, reply.step) == ("g0", 1, 7)
    assert reply.budget == unconstrained_budget(np.array(survival), FLAT, base_tokens=2, base_accepts=2.0) == 6


def test_requests_without_history_count_as_survival_one() -> None:
    steep = CostTable((1, 2, 3), (0.01, 0.017, 0.024))
    hopeless = [[0.01, 0.0, 0.0, 0.0]]
    assert budget_for(make_report(hopeless), steep, K) == 0
    assert budget_for(make_report(hopeless, num_sampling=2, base_tokens=2), steep, K) >= K


def test_positions_that_may_not_be_admitted_do_not_count() -> None:
    report = make_report([[0.9, 0.9, 0.9, 0.9]])
    assert budget_for(report, FLAT, K) == 4
    assert budget_for(replace(report, max_drafts=np.array([1])), FLAT, K) == 1


def test_a_request_of_greater_weight_draws_budget_where_equals_would_not() -> None:
    linear = CostTable((1, 2, 3), (0.010, 0.013, 0.016))
    report = make_report([[0.25, 0, 0, 0], [0.25, 0, 0, 0]], base_tokens=2)
    plain = budget_for(report, linear, K)
    assert plain == budget_for(report, linear, K, np.array([2.0, 2.0]))
    assert budget_for(make_report([[0.3, 0, 0, 0], [0.1, 0, 0, 0]], base_tokens=2), linear, K, np.array([8, 1])) == 1
    assert budget_for(make_report([[0.3, 0, 0, 0], [0.1, 0, 0, 0]], base_tokens=2), linear, K, np.array([1, 8])) == 0


def test_without_a_cost_table_there_is_no_budget() -> None:
    planner = ClusterPlanner()
    planner.register_target("g0", 1, None, K, 0.0)
    reply = planner.report("g0", 1, make_report([[1, 1, 1, 1]]), 0.0)
    assert reply is not None
    assert reply.budget is None


def test_an_empty_report_has_an_answer() -> None:
    reply = planner_with(1, 0).report("g0", 1, make_report([]), 0.0)
    assert reply is not None
    assert reply.budget == 0


def test_reports_of_an_old_epoch_and_of_strangers_are_ignored_and_counted() -> None:
    planner = planner_with(1, 1)
    assert planner.register_target("g0", 2, FLAT, K, 0.0)
    assert planner.report("g0", 1, make_report([[1, 1, 1, 1]]), 0.0) is None
    assert planner.report("stranger", 1, make_report([]), 0.0) is None
    assert planner.stats(0.0)["totals"]["stale_reports"] == 2
    assert planner.stats(0.0)["totals"]["drafted"] == 0
    assert not planner.register_target("g0", 1, FLAT, K, 0.0), "an old epoch must not come back"


def test_a_new_epoch_forgets_the_old_load_and_keeps_the_lease() -> None:
    planner = planner_with(2, 2)
    planner.report("g0", 1, make_report([[1, 1, 1, 1]]), 0.0)
    lease = planner.lease("g0", 0.0)
    planner.register_target("g0", 2, FLAT, K, 0.0)
    assert planner.stats(0.0)["groups"]["g0"]["running"] == 0
    assert planner.lease("g0", 0.0) == lease


def test_totals_are_the_sum_of_all_reports_also_of_groups_that_are_gone() -> None:
    planner = planner_with(2, 1)
    for group in ("g0", "g1", "g0"):
        planner.report(group, 1, make_report([[1, 1, 1, 1]]), 0.0)
    planner.remove_target("g0")
    totals = planner.stats(0.0)["totals"]
    assert (totals["drafted"], totals["admitted"], totals["accepted"], totals["emitted"]) == (12, 9, 6, 9)


def test_stats_are_plain_json_and_show_who_drafts_for_whom() -> None:
    planner = planner_with(3, 2)
    planner.report("g0", 1, make_report([[1, 1, 1, 1]], num_waiting=3), 0.0)
    stats = json.loads(json.dumps(planner.stats(0.0)))
    assert stats["waiting"] == 3
    assert stats["drafter_utilisation"] == pytest.approx(0.5)
    held = {drafter for drafters in stats["leases"].values() for drafter in drafters}
    assert held == {"d0", "d1"}
    served = sorted(group for drafter in stats["drafters"].values() for group in drafter["groups"])
    assert served == ["g0", "g1", "g2"]


def test_a_saturated_drafter_sends_the_least_promising_to_rest_first() -> None:
    planner = planner_with(1, 1)
    survival = [[0.05 * row] * K for row in range(1, 11)]
    planner.lease("g0", 0.0)
    planner.report("g0", 1, make_report(survival), 0.0)
    planner.heartbeat_drafter("d0", 16, 1.0, 0.0)
    threshold = planner.lease("g0", 0.0).rest_below
    accepts = np.array(survival).sum(axis=1)
    assert 0 < (accepts < threshold).sum() <= 2
    assert (accepts < threshold)[0]
    reply = planner.report("g0", 1, make_report(survival), 0.0)
    assert reply is not None
    assert reply.rest_below == threshold


def test_requests_rest_only_while_every_drafter_of_the_group_is_saturated() -> None:
    planner = planner_with(1, 2)
    planner.lease("g0", 0.0)
    planner.report("g0", 1, make_report([[0.1] * K, [0.9] * K]), 0.0)
    planner.heartbeat_drafter("d0", 16, 1.0, 0.0)
    assert planner.lease("g0", 0.0).rest_below == 0.0
    planner.heartbeat_drafter("d1", 16, 1.0, 0.0)
    assert planner.lease("g0", 0.0).rest_below > 0.0


def test_the_threshold_rises_under_saturation_holds_between_and_falls_to_zero() -> None:
    accepts = np.linspace(0.1, 3.0, 20)
    raised = rest_threshold(0.0, 0.95, accepts)
    assert raised > 0
    assert rest_threshold(raised, 0.95, accepts[accepts >= raised]) > raised
    assert rest_threshold(raised, 0.75, accepts) == raised
    levels = [raised]
    while levels[-1] > 0:
        levels.append(rest_threshold(levels[-1], 0.3, accepts))
    assert levels == sorted(levels, reverse=True)
    assert len(levels) < 20


def test_a_saturated_drafter_without_requests_sends_nobody_to_rest() -> None:
    assert rest_threshold(0.0, 1.0, np.zeros(0)) == 0.0
