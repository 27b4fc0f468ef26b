"""The cluster's view: living groups and drafters, leases, draft budgets, saturation, totals. Plain and clockless.

Knows no Ray: LoadController wraps it in an actor, simulations drive it with virtual groups. Time is an argument in
seconds of any steady clock. Letters: R requests, K draft positions.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from dspark_ray.algorithm.cost_table import CostTable
from dspark_ray.algorithm.prefix_scheduler import unconstrained_budget
from dspark_ray.engine.draft_budget import LoadReport
from dspark_ray.request import SpeculationCounts
from dspark_ray.workers.leases import assign_leases

EXPIRY_SECONDS = 5.0  # groups and drafters that are not heard of for so long are gone
REBALANCE_SECONDS = 5.0  # loads move leases at most this often; who comes and goes, at once
SATURATED, RELAXED = 0.9, 0.6  # drafter utilisation above which requests go to rest, below which they come back
REST_QUANTILE = 0.1  # of the requests with the fewest expected accepts, sent to rest at each saturated heartbeat
RELAX_FACTOR, LEAST_REST = 0.7, 0.02


State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class BudgetReply:
    """The budget that follows from one report, for a step at least the configured lag later."""

    group: str
    epoch: int
    step: int  # whose survivals it rests on
    budget: int | None  # None: no cost table, the engine decides alone
    rest_below: float  # requests with fewer expected accepts should rest from drafting; 0: none


@dataclass(frozen=True, slots=True)
class LeaseReply:
    """What a group is told about once a second."""

    drafter_ids: tuple[str, ...]
    rest_below: float


@dataclass(slots=True)
class TargetState:
    """A living target group."""

    epoch: int
    cost_table: CostTable | None
    num_draft_tokens: int
    last_seen: float
    report: LoadReport | None = None
    budget: int | None = None

    @property
    def load(self) -> float:
        return float(self.report.num_running + self.report.num_waiting) if self.report else 0.0

    @property
    def expected_accepts(self) -> np.ndarray:  # [R] float32
        return self.report.survival.sum(axis=1) if self.report else np.zeros(0, dtype=np.float32)


@dataclass(slots=True)
class DrafterRecord:
    """A living drafter. `rest_below` rises while it is saturated."""

    capacity: float
    last_seen: float
    utilisation: float = 0.0
    rest_below: float = 0.0


@dataclass(slots=True)
class Totals:
    """Since the planner began, over all groups, also those that are gone."""

    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    reports: int = 0
    stale_reports: int = 0
    lease_moves: int = 0


class ClusterPlanner:
    """Answers reports with budgets and leases drafters to groups. All calls are idempotent but for the totals."""

    def __init__(self) -> None:
        self._groups: dict[str, TargetState] = {}
        self._drafters: dict[str, DrafterRecord] = {}
        self._leases: dict[str, tuple[str, ...]] = {}
        self._totals = Totals()
        self._balanced_for: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
        self._balanced_at: float | None = None

    def register_target(
        self, group: str, epoch: int, cost_table: CostTable | None, num_draft_tokens: int, now: float
    ) -> bool:
        """Enter or refresh a group; False, and nothing changes, if a later epoch of it is known."""
        known = self._groups.get(group)
        if known is None or epoch > known.epoch:
            self._groups[group] = TargetState(epoch, cost_table, num_draft_tokens, now)
            return True
        if epoch < known.epoch:
            return False
        known.cost_table, known.num_draft_tokens, known.last_seen = cost_table, num_draft_tokens, now
        return True

    def remove_target(self, group: str) -> None:
        self._groups.pop(group, None)

    def heartbeat_drafter(self, drafter_id: str, capacity: float, utilisation: float, now: float) -> None:
        """Enter or refresh a drafter; `utilisation` is its busy share (0..1) since the heartbeat before."""
        record = self._drafters.setdefault(drafter_id, DrafterRecord(capacity, now))
        record.capacity, record.utilisation, record.last_seen = capacity, utilisation, now
        record.rest_below = rest_threshold(record.rest_below, utilisation, self._accepts_at(drafter_id))

    def remove_drafter(self, drafter_id: str) -> None:
        """A drafter that someone saw die: not leased again unless it is heard of."""
        self._drafters.pop(drafter_id, None)

    def lease(self, group: str, now: float) -> LeaseReply:
        """The drafters that a group may use at present."""
        self._settle(now)
        return LeaseReply(self._leases.get(group, ()), self._rest_below(group))

    def report(
        self, group: str, epoch: int, report: LoadReport, now: float, weights: np.ndarray | None = None
    ) -> BudgetReply | None:
        """Take a step's load and survivals; answer with the draft budget for a later step.

        The budget is the unconstrained argmax of Theta over the survivals in the report, which are old when it is used
        (paper 5.2). Requests that may draft but have no row yet count as survival 1. `weights` [R] are priorities: a
        request of weight 2 counts each accepted token twice. None if the group or this epoch of it is not known.
        """
        state = self._groups.get(group)
        if state is None or epoch != state.epoch:
            self._totals.stale_reports += 1
            return None
        self._totals.reports += 1
        self._totals.counts += SpeculationCounts(report.drafted, report.admitted, report.accepted, report.emitted)
        state.report, state.last_seen = report, now
        if state.cost_table is not None:
            state.budget = budget_for(report, state.cost_table, state.num_draft_tokens, weights)
        return BudgetReply(group, epoch, report.step, state.budget, self._rest_below(group))

    def stats(self, now: float) -> dict[str, Any]:
        """One consistent picture, JSON-able; also the signals to scale by."""
        self._settle(now)
        reports = {group: state.report for group, state in self._groups.items()}
        utilisation = [record.utilisation for record in self._drafters.values()]
        counts = self._totals.counts
        return {
            "groups": {group: self._group_stats(group, now) for group in sorted(self._groups)},
            "drafters": {drafter_id: self._drafter_stats(drafter_id, now) for drafter_id in sorted(self._drafters)},
            "leases": {group: list(held) for group, held in sorted(self._leases.items())},
            "running": sum(report.num_running for report in reports.values() if report),
            "waiting": sum(report.num_waiting for report in reports.values() if report),
            "batch_tokens": sum(report.batch_tokens for report in reports.values() if report),
            "drafter_utilisation": sum(utilisation) / len(utilisation) if utilisation else 0.0,
            "totals": {
                "drafted": counts.drafted,
                "admitted": counts.admitted,
                "accepted": counts.accepted,
                "emitted": counts.emitted,
                "reports": self._totals.reports,
                "stale_reports": self._totals.stale_reports,
                "lease_moves": self._totals.lease_moves,
            },
        }

    def _group_stats(self, group: str, now: float) -> dict[str, Any]:
        state = self._groups[group]
        report = state.report
        return {
            "epoch": state.epoch,
            "draft_budget": state.budget,
            "running": report.num_running if report else 0,
            "waiting": report.num_waiting if report else 0,
            "batch_tokens": report.batch_tokens if report else 0,
            "step": report.step if report else None,
            "rest_below": self._rest_below(group),
            "seconds_since_seen": now - state.last_seen,
        }

    def _drafter_stats(self, drafter_id: str, now: float) -> dict[str, Any]:
        record = self._drafters[drafter_id]
        return {
            "capacity": record.capacity,
            "utilisation": record.utilisation,
            "rest_below": record.rest_below,
            "groups": [group for group, held in sorted(self._leases.items()) if drafter_id in held],
            "seconds_since_seen": now - record.last_seen,
        }

    def _settle(self, now: float) -> None:
        """Drop who is gone, and lease anew if someone came or went or the loads have had time to change."""
        self._groups = living(self._groups, lambda state: state.last_seen, now)
        self._drafters = living(self._drafters, lambda record: record.last_seen, now)
        members = frozenset(self._groups), frozenset(self._drafters)
        due = self._balanced_at is None or now - self._balanced_at >= REBALANCE_SECONDS
        if members == self._balanced_for and not due:
            return
        loads = {group: state.load for group, state in self._groups.items()}
        capacities = {drafter_id: record.capacity for drafter_id, record in self._drafters.items()}
        leases = assign_leases(self._leases, loads, capacities)
        self._totals.lease_moves += sum(leases[group] != self._leases.get(group) for group in leases)
        self._leases, self._balanced_for, self._balanced_at = leases, members, now

    def _accepts_at(self, drafter_id: str) -> np.ndarray:  # [R] float32
        """Expected accepts of the requests that this drafter drafts for, over all groups that lease it."""
        rows = [
            self._groups[group].expected_accepts
            for group, held in self._leases.items()
            if drafter_id in held and group in self._groups
        ]
        return np.concatenate(rows) if rows else np.zeros(0, dtype=np.float32)

    def _rest_below(self, group: str) -> float:
        """Requests rest only if every drafter of their group is saturated."""
        held = [
            self._drafters[drafter_id] for drafter_id in self._leases.get(group, ()) if drafter_id in self._drafters
        ]
        return min((record.rest_below for record in held), default=0.0)


def rest_threshold(present: float, utilisation: float, expected_accepts: np.ndarray) -> float:
    """The next threshold of a drafter: raised past the least promising requests while it is saturated, lowered while
    it has room, kept in between.

    Args:
        expected_accepts: [R], sum of survivals of each request's last draft.
    """
    if utilisation > SATURATED and len(expected_accepts):
        return max(present, float(np.quantile(expected_accepts, REST_QUANTILE)))
    if utilisation < RELAXED:
        lowered = present * RELAX_FACTOR
        return lowered if lowered >= LEAST_REST else 0.0
    return present


def budget_for(
    report: LoadReport, cost_table: CostTable, num_draft_tokens: int, weights: np.ndarray | None = None
) -> int:
    """The argmax of Theta without the early stop (paper 5.2): reported survivals, and 1 for requests without any.

    Args:
        weights: [R] priorities of the reported rows; others have weight 1. Only ratios count.
    """
    survival = report.survival[:, :num_draft_tokens].astype(np.float32)  # [R, K]
    num_new = max(0, report.num_sampling - len(survival))
    share = np.ones(len(survival) + num_new, dtype=np.float32)
    if weights is not None:
        share[: len(survival)] = weights
        share /= share.max(initial=1.0)
    ones = np.ones((num_new, survival.shape[1]), dtype=np.float32)
    limits = np.concatenate([report.max_drafts, np.full(num_new, num_draft_tokens)])
    return unconstrained_budget(
        np.concatenate([survival, ones]) * share[:, None],
        cost_table,
        base_tokens=report.base_tokens,
        base_accepts=float(share.sum()),
        max_drafts=limits,
    )


def living(states: dict[str, State], last_seen: Callable[[State], float], now: float) -> dict[str, State]:
    """Those that were heard of in time."""
    return {key: state for key, state in states.items() if now - last_seen(state) <= EXPIRY_SECONDS}
