"""Which drafter holds which request, what each must be told, and which drafts are on their way. No Ray, no clock.

Drafts on their way are any values (ObjectRefs in service). Letters: R rows of a step, K draft positions, D drafters.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dspark_ray.engine.batch import DraftPlan, StepPlan, StepResult

REST_STEPS = 64  # a resting request tries a draft again after so many steps
ACCEPTS_EMA = 0.2  # weight of the newest draft in a request's expected accepts


@dataclass(slots=True)
class DrafterState:
    """What one drafter has been told: requests whose tokens it has, and requests it may forget."""

    known: set[str] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class PendingDraft:
    """A draft batch under way: from whom, and for which requests it is still of use."""

    drafter_id: str
    ref: Any
    awaited: set[str]


@dataclass(frozen=True, slots=True)
class RoutedStep:
    """A step's routes to the living drafters in `drafter_ids` order, and the plan for each that must be called."""

    drafter_ids: tuple[str, ...]  # D
    routes: np.ndarray  # [R] int64, drafter index (of no meaning where wants_draft is False)
    wants_draft: np.ndarray  # [R] bool, the plan's, without requests that rest or find no drafter
    plans: dict[str, DraftPlan]
    rows: dict[str, tuple[str, ...]]  # request ids routed to each called drafter


class DraftRoutes:
    """Sticky assignment of requests to drafters, least loaded first.

    `route` assigns and looks; `commit` records that the drafters were really told, so that a step whose submission
    failed is routed again without losing what its drafters should have learnt. `rest_below` is the controller's wish
    when drafters saturate: requests with fewer expected accepts (mean sum of survivals of their past drafts) rest.
    """

    def __init__(self) -> None:
        self.rest_below = 0.0
        self._drafters: dict[str, DrafterState] = {}
        self._assigned: dict[str, str] = {}
        self._pending: list[PendingDraft] = []
        self._expected_accepts: dict[str, float] = {}
        self._resting_until: dict[str, int] = {}

    @property
    def num_requests(self) -> dict[str, int]:
        """Requests assigned to each drafter."""
        counts = Counter(self._assigned.values())
        return {drafter_id: counts[drafter_id] for drafter_id in self._drafters}

    @property
    def num_resting(self) -> int:
        return len(self._resting_until)

    def update_drafters(self, drafter_ids: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Take over the present drafters; returns what each drafter that left still knows of ours."""
        present = tuple(drafter_ids)
        gone = {
            drafter_id: self.remove(drafter_id) for drafter_id in tuple(self._drafters) if drafter_id not in present
        }
        for drafter_id in present:
            self._drafters.setdefault(drafter_id, DrafterState())
        return gone

    def remove(self, drafter_id: str) -> tuple[str, ...]:
        """Forget a drafter that is dead or leased no longer; its requests find another when next routed."""
        state = self._drafters.pop(drafter_id)
        self._assigned = {request: holder for request, holder in self._assigned.items() if holder != drafter_id}
        self._pending = [draft for draft in self._pending if draft.drafter_id != drafter_id]
        return tuple(sorted(state.known | state.dropped))

    def finish(self, request_ids: tuple[str, ...]) -> None:
        """Requests that are over: their drafters may free what they keep, with their next call."""
        for request_id in request_ids:
            self._release(request_id)
            self._expected_accepts.pop(request_id, None)
            self._resting_until.pop(request_id, None)
        self._use_up(set(request_ids))

    def forget_tokens(self) -> None:
        """The target group was lost: every request starts again from its first token, here too."""
        self._pending.clear()
        for state in self._drafters.values():
            state.dropped |= state.known
            state.known.clear()

    def route(self, plan: StepPlan, histories: Mapping[str, np.ndarray]) -> RoutedStep:
        """Assign the rows that want drafts. A drafter is called if it has rows or something to forget."""
        self._end_rest(plan.step)
        wants = np.array(
            [
                bool(wish) and bool(self._drafters) and request not in self._resting_until
                for request, wish in zip(plan.request_ids, plan.wants_draft, strict=True)
            ],
            dtype=bool,
        )
        wanted = [plan.request_ids[row] for row in np.flatnonzero(wants)]
        self._assign(wanted)
        index = {drafter_id: i for i, drafter_id in enumerate(self._drafters)}
        routes = np.array(
            [index.get(self._assigned.get(request, ""), 0) for request in plan.request_ids], dtype=np.int64
        )
        plans, rows = {}, {}
        for drafter_id, state in self._drafters.items():
            mine = tuple(request for request in wanted if self._assigned[request] == drafter_id)
            if mine or state.dropped:
                new = {r: histories[r] for r in mine if r not in state.known and r in histories}
                plans[drafter_id] = DraftPlan(plan.step, tuple(sorted(state.dropped)), new)
                rows[drafter_id] = mine
        return RoutedStep(tuple(self._drafters), routes, wants, plans, rows)

    def drafts_for(self, plan: StepPlan) -> list[PendingDraft]:
        """Drafts under way that hold a row of this step (another cohort's stay for its own step)."""
        here = set(plan.request_ids)
        return [draft for draft in self._pending if draft.awaited & here]

    def discard(self, drafts: list[PendingDraft]) -> None:
        self._pending = [draft for draft in self._pending if draft not in drafts]

    def commit(self, plan: StepPlan, routed: RoutedStep, refs: dict[str, Any], result: StepResult) -> None:
        """The step ran: its drafts are used up, its drafters were told, and new drafts (`refs`) are under way."""
        self._use_up(set(plan.request_ids))
        sampling = {request for request, samples in zip(plan.request_ids, plan.samples, strict=True) if samples}
        for drafter_id, draft_plan in routed.plans.items():
            state = self._drafters[drafter_id]
            state.known |= set(routed.rows[drafter_id])
            state.dropped -= set(draft_plan.dropped)
            awaited = sampling & set(routed.rows[drafter_id])
            if awaited:
                self._pending.append(PendingDraft(drafter_id, refs[drafter_id], awaited))
        self._learn(plan, result)

    def _learn(self, plan: StepPlan, result: StepResult) -> None:
        """Update expected accepts from the drafts that this step judged, and send the hopeless to rest.

        Rests on drafts of the past alone: whether the next draft is made never depends on what it would be.
        """
        for row in np.flatnonzero(result.num_drafted):
            request, accepts = plan.request_ids[row], float(result.survival[row].sum())
            before = self._expected_accepts.get(request, accepts)
            self._expected_accepts[request] = before + ACCEPTS_EMA * (accepts - before)
            if self._expected_accepts[request] < self.rest_below:
                self._release(request)
                self._expected_accepts.pop(request)
                self._resting_until[request] = plan.step + REST_STEPS

    def _end_rest(self, step: int) -> None:
        if self.rest_below <= 0.0:
            self._resting_until.clear()
        self._resting_until = {request: until for request, until in self._resting_until.items() if until > step}

    def _release(self, request_id: str) -> None:
        state = self._drafters.get(self._assigned.pop(request_id, ""))
        if state is not None and request_id in state.known:
            state.known.discard(request_id)
            state.dropped.add(request_id)

    def _assign(self, request_ids: list[str]) -> None:
        load = self.num_requests
        for request_id in request_ids:
            if request_id not in self._assigned:
                least = min(load, key=lambda drafter_id: load[drafter_id])
                self._assigned[request_id] = least
                load[least] += 1

    def _use_up(self, request_ids: set[str]) -> None:
        for draft in self._pending:
            draft.awaited -= request_ids
        self._pending = [draft for draft in self._pending if draft.awaited]
