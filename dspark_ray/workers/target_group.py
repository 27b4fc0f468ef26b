"""The ranks of one target group: placed, started together, called together, killed together. Knows no drafters."""

import asyncio
import logging
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from dspark_ray.config import AppConfig
from dspark_ray.engine.batch import StepPlan, TargetInfo
from dspark_ray.errors import DSparkError, ExecutorError
from dspark_ray.workers.names import NAMESPACE, target_worker_name
from dspark_ray.workers.placement import GroupPlacement, place_group, rank_options, release, wait_placed
from dspark_ray.workers.target_worker import TargetWorker

logger = logging.getLogger(__name__)


class TargetGroup:
    """One or more TargetWorkers in one placement group. A group that lost a rank is rebuilt whole by `build`."""

    def __init__(self, config: AppConfig, app_name: str, name: str) -> None:
        self._config, self._app_name, self.name = config, app_name, name
        self._placement: GroupPlacement | None = None
        self._ranks: list[Any] = []
        self.epoch = 0

    async def build(self) -> TargetInfo:
        """Place (once), start, connect and load the ranks.

        Raises PlacementError, the runner's own errors (ConfigError and below), or ExecutorError if a rank dies.
        """
        target = self._config.target
        if self._placement is None:
            self._placement = await place_group(target)
        elif self.epoch:
            await wait_placed(self._placement, target)
        self.epoch += 1
        config = self._config.model_copy(
            update={"target": target.model_copy(update={"device": self._placement.device})}
        )
        try:
            self._ranks = [self._start_rank(config, rank) for rank in range(target.tensor_parallel_size)]
            address = await self._rendezvous()
            await self.call_all("setup", address)
            infos = await self.call_all("load")
        except BaseException:
            self.kill()
            raise
        return replace(infos[0], num_pages=min(info.num_pages for info in infos))

    def _start_rank(self, config: AppConfig, rank: int) -> Any:
        assert self._placement is not None
        name = target_worker_name(self._app_name, self.name, rank, self.epoch)
        options = rank_options(self._placement, config.target, rank, name, NAMESPACE)
        return ray.remote(TargetWorker).options(**options).remote(config, rank, config.target.tensor_parallel_size)

    async def _rendezvous(self) -> tuple[str, int] | None:
        """Where the ranks meet, chosen anew by rank 0 for every group; None for a group of one."""
        if len(self._ranks) == 1:
            return None
        return (await self._answers([self._ranks[0].address.remote()]))[0]

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        """The same call on every rank at once, answers by rank; ExecutorError and a killed group if one fails."""
        if not self._ranks:
            raise ExecutorError(f"target group {self.name} is not running")
        return await self._answers([getattr(rank, method).remote(*args) for rank in self._ranks])

    async def _answers(self, refs: list[Any]) -> list[Any]:
        """Wait for all, but give up at the first error: its peers may wait for it in a collective for ever."""
        tasks = [asyncio.wrap_future(ref.future()) for ref in refs]
        done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        error = next((task.exception() for task in done if task.exception() is not None), None)
        for task in waiting:
            task.cancel()
        if error is None:
            return [task.result() for task in tasks]
        self.kill()
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, DSparkError):
            raise cause
        raise ExecutorError(f"a rank of target group {self.name} failed: {cause!r}") from error

    def execute(self, plan: StepPlan, num_drafters: int, drafts: list[Any]) -> tuple[list[Any], list[Any]]:
        """Submit a step to every rank with the same arguments; refs of each rank's answer and of D FeatureBatches."""
        if not self._ranks:
            raise ExecutorError(f"target group {self.name} is not running")
        first, *others = self._ranks
        returned = first.execute.options(num_returns=1 + num_drafters).remote(plan, num_drafters, *drafts)
        refs = list(returned) if num_drafters else [returned]
        answers = [refs[0], *(rank.execute.remote(plan, num_drafters, *drafts) for rank in others)]
        return answers, refs[1:]

    def kill(self) -> None:
        """Kill every rank at once; NCCL would otherwise keep the survivors waiting for the dead."""
        for rank in self._ranks:
            try:
                ray.kill(rank)
            except RayError as error:
                logger.debug("rank was gone already: %s", error)
        self._ranks = []

    def close(self) -> None:
        self.kill()
        if self._placement is not None:
            release(self._placement)
            self._placement = None

    def describe(self) -> dict[str, Any]:
        """For stats: names and device of the ranks, and how often the group was built."""
        names = [target_worker_name(self._app_name, self.name, rank, self.epoch) for rank in range(len(self._ranks))]
        device = self._placement.device if self._placement else None
        return {"group": self.name, "epoch": self.epoch, "ranks": names, "device": device}
