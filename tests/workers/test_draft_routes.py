"""DraftRoutes without Ray: who drafts for whom, what drafters are told, which drafts go into a step."""

import numpy as np

from dspark_ray.engine.batch import StepPlan, StepResult
from dspark_ray.engine.profiler import greedy_columns
from dspark_ray.workers.draft_routes import REST_STEPS, DraftRoutes, RoutedStep

K = 3


def make_plan(*request_ids: str, step: int = 1, wants: bool = True, samples: bool = True) -> StepPlan:
    rows = len(request_ids)
    return StepPlan(
        step=step,
        request_ids=request_ids,
        token_ids=np.zeros(rows, dtype=np.int64),
        query_lens=np.ones(rows, dtype=np.int64),
        start_positions=np.zeros(rows, dtype=np.int64),
        samples=np.full(rows, samples),
        max_drafts=np.full(rows, K),
        page_table=np.zeros((rows, 1), dtype=np.int64),
        sampling=greedy_columns(rows),
        wants_draft=np.full(rows, wants),
    )


def make_result(plan: StepPlan, survival: float = 0.5, drafted: int = 0) -> StepResult:
    rows = plan.num_rows
    zeros = np.zeros(rows, dtype=np.int64)
    return StepResult(
        plan.step,
        tokens=np.zeros((rows, K + 1), dtype=np.int64),
        num_new=zeros,
        num_drafted=np.full(rows, drafted),
        num_admitted=zeros,
        num_accepted=zeros,
        survival=np.full((rows, K), survival, dtype=np.float32),
        failed=np.zeros(rows, dtype=bool),
        batch_tokens=rows,
        step_seconds=0.01,
    )


def run(routes: DraftRoutes, plan: StepPlan, survival: float = 0.5, drafted: int = 0) -> RoutedStep:
    """Route and commit; the draft under way from drafter d is named d/step."""
    routed = routes.route(plan, {request: np.arange(5) for request in plan.request_ids})
    refs = {drafter_id: f"{drafter_id}/{plan.step}" for drafter_id in routed.plans}
    routes.commit(plan, routed, refs, make_result(plan, survival, drafted))
    return routed


def with_drafters(*drafter_ids: str) -> DraftRoutes:
    routes = DraftRoutes()
    routes.update_drafters(drafter_ids)
    return routes


def test_requests_spread_over_drafters_and_stay_where_they_are() -> None:
    routes = with_drafters("x", "y")
    first = run(routes, make_plan("a", "b", "c", "d"))
    assert sorted(first.routes.tolist()) == [0, 0, 1, 1]
    again = run(routes, make_plan("d", "c", "b", "a", step=2))
    assert again.routes.tolist() == first.routes.tolist()[::-1]


def test_only_requests_new_to_a_drafter_bring_their_history() -> None:
    routes = with_drafters("x")
    assert set(run(routes, make_plan("a")).plans["x"].histories) == {"a"}
    assert set(run(routes, make_plan("a", "b", step=2)).plans["x"].histories) == {"b"}


def test_a_step_takes_the_drafts_of_its_own_requests_once() -> None:
    routes = with_drafters("x", "y")
    plan = make_plan("a", "b")
    assert routes.drafts_for(plan) == []
    run(routes, plan)
    assert [draft.ref for draft in routes.drafts_for(make_plan("a", "b", step=2))] == ["x/1", "y/1"]
    assert [draft.ref for draft in routes.drafts_for(make_plan("b", step=2))] == ["y/1"]
    run(routes, make_plan("a", "b", step=2))
    assert [draft.ref for draft in routes.drafts_for(make_plan("a", "b", step=3))] == ["x/2", "y/2"]


def test_the_draft_of_another_cohort_waits_for_its_own_step() -> None:
    routes = with_drafters("x")
    run(routes, make_plan("a", step=1))
    run(routes, make_plan("b", step=2))
    assert [draft.ref for draft in routes.drafts_for(make_plan("a", step=3))] == ["x/1"]


def test_a_prefill_chunk_is_sent_but_no_draft_is_awaited() -> None:
    routes = with_drafters("x")
    routed = run(routes, make_plan("a", samples=False))
    assert routed.rows["x"] == ("a",)
    assert routes.drafts_for(make_plan("a", step=2)) == []


def test_a_finished_request_is_dropped_with_the_next_call_and_only_once() -> None:
    routes = with_drafters("x", "y")
    run(routes, make_plan("a", "b"))
    routes.finish(("a", "never-seen"))
    assert routes.drafts_for(make_plan("a", step=2)) == []
    told = run(routes, make_plan("b", step=2))
    assert told.plans["x"].dropped == ("a",)
    assert told.rows["x"] == ()
    assert told.plans["y"].dropped == ()
    assert "x" not in run(routes, make_plan("b", step=3)).plans


def test_nothing_is_forgotten_when_a_submission_fails() -> None:
    routes = with_drafters("x")
    run(routes, make_plan("a"))
    routes.finish(("a",))
    plan = make_plan("b", step=2)
    first = routes.route(plan, {"b": np.arange(3)})
    assert first.plans["x"].dropped == ("a",)
    again = routes.route(plan, {"b": np.arange(3)})
    assert again.plans["x"].dropped == ("a",)
    assert set(again.plans["x"].histories) == {"b"}


def test_requests_of_a_lost_drafter_find_another_and_bring_their_history() -> None:
    routes = with_drafters("x", "y")
    run(routes, make_plan("a", "b"))
    gone = routes.update_drafters(("y",))
    assert gone == {"x": ("a",)}
    assert [draft.ref for draft in routes.drafts_for(make_plan("a", "b", step=2))] == ["y/1"]
    routed = run(routes, make_plan("a", "b", step=2))
    assert routed.rows == {"y": ("a", "b")}
    assert set(routed.plans["y"].histories) == {"a"}


def test_without_drafters_nobody_wants_a_draft_and_nobody_is_called() -> None:
    routes = with_drafters()
    routed = run(routes, make_plan("a"))
    assert not routed.wants_draft.any()
    assert routed.plans == {}
    assert routed.drafter_ids == ()


def test_a_request_that_does_not_speculate_takes_no_place_at_a_drafter() -> None:
    routes = with_drafters("x")
    run(routes, make_plan("a", wants=False))
    assert routes.num_requests == {"x": 0}


def test_after_the_group_was_lost_every_request_is_dropped_and_new_again() -> None:
    routes = with_drafters("x")
    run(routes, make_plan("a"))
    routes.forget_tokens()
    assert routes.drafts_for(make_plan("a", step=2)) == []
    told = run(routes, make_plan("a", step=2)).plans["x"]
    assert told.dropped == ("a",)
    assert set(told.histories) == {"a"}


def test_a_hopeless_request_rests_and_tries_again_later() -> None:
    routes = with_drafters("x")
    routes.rest_below = 1.0
    run(routes, make_plan("a", step=1), survival=0.1, drafted=K)
    assert routes.num_resting == 1
    resting = run(routes, make_plan("a", step=2))
    assert not resting.wants_draft.any()
    assert resting.plans["x"].dropped == ("a",)
    awake = run(routes, make_plan("a", step=1 + REST_STEPS))
    assert awake.wants_draft.all()
    assert set(awake.plans["x"].histories) == {"a"}


def test_a_promising_request_does_not_rest_and_relief_wakes_everyone() -> None:
    routes = with_drafters("x")
    routes.rest_below = 1.0
    run(routes, make_plan("a"), survival=0.9, drafted=K)
    assert routes.num_resting == 0
    run(routes, make_plan("b", step=2), survival=0.1, drafted=K)
    assert routes.num_resting == 1
    routes.rest_below = 0.0
    assert run(routes, make_plan("b", step=3)).wants_draft.all()


def test_one_bad_draft_does_not_send_a_good_request_to_rest() -> None:
    routes = with_drafters("x")
    routes.rest_below = 1.0
    for step in range(1, 6):
        run(routes, make_plan("a", step=step), survival=0.9, drafted=K)
    run(routes, make_plan("a", step=6), survival=0.0, drafted=K)
    assert routes.num_resting == 0
