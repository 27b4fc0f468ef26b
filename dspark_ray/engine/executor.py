"""How the engine runs a step: the seam between one process (LocalExecutor) and Ray (workers/ray_executor.py)."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from dspark_ray.algorithm.cost_table import CostTable
from dspark_ray.engine.batch import StepPlan, StepResult, TargetInfo


class Executor(Protocol):
    """Runs steps on a target group and its drafters.

    `step` also makes the drafters propose for the step after: their drafts are used by the next `step` of the same
    requests without passing the engine; `histories` gives the tokens before this step for requests whose drafter is
    new to them, `finished` names requests whose drafter state can go. It raises ExecutorError when the group is lost;
    `restart` then builds a new one (all KV pages are lost). A lost drafter only means fewer drafts.
    """

    async def start(self) -> TargetInfo: ...

    async def step(
        self, plan: StepPlan, finished: tuple[str, ...], histories: Mapping[str, np.ndarray]
    ) -> StepResult: ...

    async def profile(self) -> CostTable: ...

    async def set_cost_table(self, table: CostTable | None) -> None: ...

    async def restart(self) -> None: ...

    async def close(self) -> None: ...

    def describe(self) -> dict[str, Any]: ...
