"""The engine's executor in one process, without Ray: the test seam, the single-process mode, Ray's cost baseline."""

import asyncio
import gc
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dspark_ray.algorithm.cost_table import CostTable
from dspark_ray.algorithm.proposal import DraftBatch
from dspark_ray.config import AppConfig
from dspark_ray.engine.batch import DraftPlan, StepPlan, StepResult, TargetInfo
from dspark_ray.engine.drafters.base import Drafter
from dspark_ray.engine.drafters.factory import build_drafter
from dspark_ray.engine.profiler import profile_drafter
from dspark_ray.engine.target_runner import TargetRunner


class LocalExecutor:
    """Runs target and drafter one after the other on a thread of its own; the event loop stays free. Its one drafter
    never changes, so it has seen every request from the start."""

    def __init__(self, config: AppConfig, drafter: Drafter | None = None) -> None:
        self._config = config
        self._given_drafter = drafter
        self._drafter: Drafter | None = None
        self._runner = TargetRunner(config)
        self._drafts: tuple[DraftBatch, ...] = ()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dspark-step")

    async def start(self) -> TargetInfo:
        return await self._call(self._start)

    def _start(self) -> TargetInfo:
        torch.set_num_threads(self._config.target.num_threads)
        info = self._runner.load()
        self._drafter = self._given_drafter or build_drafter(self._config)
        return info

    async def step(self, plan: StepPlan, finished: tuple[str, ...], histories: Mapping[str, np.ndarray]) -> StepResult:
        return await self._call(self._step, plan, finished)

    def _step(self, plan: StepPlan, finished: tuple[str, ...]) -> StepResult:
        plan = replace(plan, routes=np.zeros(plan.num_rows, dtype=np.int64))
        result, features = self._runner.execute(plan, 1 if self._drafter else 0, *self._drafts)
        assert result is not None
        if self._drafter is not None:
            self._drafts = (self._drafter.propose(DraftPlan(plan.step, finished), features[0]),)
        return result

    async def profile(self) -> CostTable:
        return await self._call(self._profile)

    def _profile(self) -> CostTable:
        table = self._runner.profile()
        if self._drafter is None:
            return table
        return table.with_draft_seconds(profile_drafter(self._drafter, *self._runner.feature_shape))

    async def set_cost_table(self, table: CostTable | None) -> None:
        self._runner.set_cost_table(table)

    async def restart(self) -> None:
        """Nothing to rebuild in one process: pages keep their slots, their contents are recomputed."""
        self._drafts = ()

    async def close(self) -> None:
        """Free weights and pages: modules and their hooks refer to each other, so without a collection they stay."""
        self._thread.shutdown(wait=True)
        self._runner, self._drafter, self._drafts = TargetRunner(self._config), None, ()
        gc.collect()

    def describe(self) -> dict[str, Any]:
        return {"executor": "local", "drafters": 1 if self._drafter else 0}

    async def _call(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
