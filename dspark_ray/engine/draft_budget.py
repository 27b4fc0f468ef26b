"""The draft budget of a step from confidences of earlier steps (paper 5.2), and who computes it.

The budget rests on survivals at least `lag` steps old: it cannot depend on the tokens it admits, which keeps the
unconstrained search lossless. The cluster's controller answers when it is fresh; else the local estimate serves.
"""

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dspark_ray.algorithm.cost_table import CostTable
from dspark_ray.algorithm.prefix_scheduler import PrefixScheduler, complete_survival
from dspark_ray.config import VerificationConfig


def build_prefix_scheduler(
    config: VerificationConfig, num_draft_tokens: int, cost_table: CostTable | None
) -> PrefixScheduler:
    """The configured policy; `none` where nothing is drafted. Raises ConfigError if a needed cost table is missing."""
    policy = config.policy if num_draft_tokens else "none"
    return PrefixScheduler(policy, cost=cost_table, static_len=config.static_len, threshold=config.threshold)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What an engine tells the controller after a step; small numbers only."""

    step: int
    num_running: int
    num_waiting: int
    base_tokens: int  # anchors and prefill tokens of the step
    batch_tokens: int
    num_sampling: int  # requests that may carry drafts
    survival: np.ndarray  # [R, K] float32, of the drafts that arrived at this step
    max_drafts: np.ndarray  # [R] int64
    step_seconds: float
    draft_seconds: float
    drafted: int
    admitted: int
    accepted: int
    emitted: int


class BudgetSource(Protocol):
    """The cluster's view, off the step path: takes reports, offers the last budget it answered with while fresh."""

    def report(self, report: LoadReport) -> None: ...

    def budget(self) -> int | None: ...


class LaggedSurvival:
    """The last `lag` steps' survivals by request, and the newest ones old enough to use."""

    def __init__(self, lag: int) -> None:
        self._recent: deque[dict[str, np.ndarray]] = deque()
        self._lag = lag
        self._usable: dict[str, np.ndarray] = {}

    def push(self, rows: dict[str, np.ndarray]) -> None:
        """Record the survivals seen at the step that has just ended."""
        self._recent.append(rows)
        if len(self._recent) >= self._lag:
            self._usable.update(self._recent.popleft())

    def forget(self, request_ids: tuple[str, ...]) -> None:
        for request_id in request_ids:
            self._usable.pop(request_id, None)

    def matrix(self, request_ids: tuple[str, ...], num_draft_tokens: int) -> np.ndarray:  # [R, K]
        """One row a request; requests without usable history count as survival 1."""
        return complete_survival([self._usable.get(request_id) for request_id in request_ids], num_draft_tokens)


class DraftBudget:
    """Answers one question a step: how many drafts may be admitted over all requests."""

    def __init__(
        self, scheduler: PrefixScheduler, lag: int, num_draft_tokens: int, source: BudgetSource | None
    ) -> None:
        self._scheduler, self._source, self._width = scheduler, source, num_draft_tokens
        self._lagged = LaggedSurvival(lag)
        self.in_force: int | None = None
        self.from_controller = 0
        self.from_local = 0

    def decide(
        self, request_ids: tuple[str, ...], max_drafts: np.ndarray, prefill_tokens: int, cost_table: CostTable | None
    ) -> int | None:
        """The budget for the step being planned, over its sampling rows; None where the policy decides alone."""
        if self._scheduler.policy != "adaptive" or self._width == 0:
            return None
        remote = self._source.budget() if self._source else None
        if remote is not None:
            self.from_controller += 1
            self.in_force = remote
        else:
            self.from_local += 1
            survival = self._lagged.matrix(request_ids, self._width)
            self.in_force = self._scheduler.budget(survival, max_drafts, cost_table, prefill_tokens)
        return self.in_force

    def observe(self, rows: dict[str, np.ndarray], finished: tuple[str, ...], report: LoadReport) -> None:
        self._lagged.push(rows)
        self._lagged.forget(finished)
        if self._source is not None:
            self._source.report(report)
