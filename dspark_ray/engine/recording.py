"""An executor that also remembers what became of every draft: for calibration and evaluation.

Knows nothing of either. Letters: S drafts, K draft positions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark_ray.algorithm.cost_table import CostTable
from dspark_ray.engine.batch import StepPlan, StepResult, TargetInfo
from dspark_ray.engine.executor import Executor

LEAST_SURVIVAL = 1e-30  # float32 products below it have lost their factors


@dataclass(frozen=True, slots=True)
class DraftOutcomes:
    """Drafts that were sent to verification. An acceptance counts what the target agreed to, also behind the end of a
    reply: that is what the scheduler's confidences are about."""

    confidences: np.ndarray  # [S, K] float64, conditional; 0 past the end of a draft
    admitted: np.ndarray  # [S] int64
    accepted: np.ndarray  # [S] int64

    def __len__(self) -> int:
        return len(self.admitted)

    @property
    def num_draft_tokens(self) -> int:
        return self.confidences.shape[1]

    def complete(self) -> "DraftOutcomes":
        """Those verified in full: where a draft was cut, its acceptance is not known."""
        return self.select(self.admitted == self.num_draft_tokens)

    def select(self, rows: np.ndarray) -> "DraftOutcomes":
        return DraftOutcomes(self.confidences[rows], self.admitted[rows], self.accepted[rows])

    @property
    def logits(self) -> np.ndarray:  # [S, K]
        """Of the confidences."""
        clipped = np.clip(self.confidences, 1e-7, 1 - 1e-7)
        return np.log(clipped) - np.log1p(-clipped)


def concatenate(parts: list[DraftOutcomes]) -> DraftOutcomes:
    """All drafts of one drafter. Parts without any are left out: where nothing was decoded, K is not known."""
    parts = [part for part in parts if len(part)] or parts[:1]
    return DraftOutcomes(
        np.concatenate([part.confidences for part in parts]),
        np.concatenate([part.admitted for part in parts]),
        np.concatenate([part.accepted for part in parts]),
    )


class RecordingExecutor:
    """Implements Executor by another one; `take` hands out the outcomes since it was last called."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._results: list[StepResult] = []

    def take(self) -> DraftOutcomes:
        results, self._results = self._results, []
        parts = [_outcomes(result) for result in results]
        if not parts:
            none = np.zeros(0, dtype=np.int64)
            return DraftOutcomes(np.zeros((0, 0)), none, none)
        return concatenate(parts)

    async def start(self) -> TargetInfo:
        return await self._inner.start()

    async def step(self, plan: StepPlan, finished: tuple[str, ...], histories: Mapping[str, np.ndarray]) -> StepResult:
        result = await self._inner.step(plan, finished, histories)
        self._results.append(result)
        return result

    async def profile(self) -> CostTable:
        return await self._inner.profile()

    async def set_cost_table(self, table: CostTable | None) -> None:
        await self._inner.set_cost_table(table)

    async def restart(self) -> None:
        await self._inner.restart()

    async def close(self) -> None:
        await self._inner.close()

    def describe(self) -> dict[str, Any]:
        return self._inner.describe()


def _outcomes(result: StepResult) -> DraftOutcomes:
    verified = (result.num_admitted > 0) & ~result.failed
    survival = result.survival[verified].astype(np.float64)
    before = np.concatenate([np.ones((len(survival), 1)), survival[:, :-1]], axis=1)
    confidences = np.where(before > LEAST_SURVIVAL, survival / np.maximum(before, LEAST_SURVIVAL), 0.0)
    return DraftOutcomes(confidences, result.num_admitted[verified], result.num_accepted[verified])
