"""One rank of a target group as a Ray actor: a thin shell that joins torch.distributed and calls a TargetRunner.

Knows nothing of requests, leases or recovery: a rank that fails is killed with its whole group by the executor.
"""

import os
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist

from dspark_ray.algorithm.cost_table import CostTable
from dspark_ray.algorithm.proposal import DraftBatch
from dspark_ray.config import AppConfig
from dspark_ray.engine.batch import StepPlan, TargetInfo
from dspark_ray.engine.target_runner import TargetRunner
from dspark_ray.errors import ExecutorError

RENDEZVOUS_TIMEOUT = timedelta(minutes=10)  # loading skews ranks by minutes


class TargetWorker:
    """Runs one rank. Calls in order: `address` (rank 0 of several), `setup`, `load`, then steps."""

    def __init__(self, config: AppConfig, rank: int, world_size: int) -> None:
        self._config, self._rank, self._world_size = config, rank, world_size
        self._runner = TargetRunner(config, rank=rank, world_size=world_size)
        self._store: dist.TCPStore | None = None
        self._last_step: int | None = None

    def address(self) -> tuple[str, int]:
        """Rank 0: open the rendezvous store on a port that the system picks, and keep it open: no port is ever
        chosen before it is bound, so restarts and neighbours cannot clash."""
        host = ray.util.get_node_ip_address()
        self._store = dist.TCPStore(host, 0, self._world_size, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def setup(self, address: tuple[str, int] | None) -> None:
        """Set thread counts and join the group (`address` is None for a group of one)."""
        torch.set_num_threads(self._config.target.num_threads)
        if address is None:
            return
        # transformers' tensor parallelism reads these; Ray shows a rank its own GPU only, hence local rank 0
        os.environ.update(RANK=str(self._rank), LOCAL_RANK="0", WORLD_SIZE=str(self._world_size))
        store = self._store or dist.TCPStore(*address, self._world_size, is_master=False, timeout=RENDEZVOUS_TIMEOUT)
        cuda = self._config.target.device == "cuda"
        dist.init_process_group(
            backend="nccl" if cuda else "gloo",
            store=store,
            rank=self._rank,
            world_size=self._world_size,
            timeout=RENDEZVOUS_TIMEOUT,
            device_id=torch.device("cuda", 0) if cuda else None,
        )

    def load(self) -> TargetInfo:
        return self._runner.load()

    def set_cost_table(self, table: CostTable | None) -> None:
        self._runner.set_cost_table(table)

    def profile(self) -> CostTable | None:
        return self._runner.profile()

    def feature_shape(self) -> tuple[int, torch.dtype]:
        return self._runner.feature_shape

    def execute(self, plan: StepPlan, num_drafters: int, *drafts: DraftBatch) -> Any:
        """Run a step. Rank 0 returns the StepResult and behind it one FeatureBatch per drafter (as separate Ray
        returns); other ranks None.

        Every failure inside is an ExecutorError. The executor relies on it: any other error of the call means that
        an argument could not be had and that the step was not run. A step is never run twice.
        """
        if plan.step == self._last_step:
            raise ExecutorError(f"rank {self._rank} has already run step {plan.step}")
        self._last_step = plan.step
        try:
            result, features = self._runner.execute(plan, num_drafters, *drafts)
        except Exception as error:
            raise ExecutorError(f"rank {self._rank} failed in step {plan.step}: {error!r}") from error
        if self._rank != 0:
            return None
        return (result, *features) if features else result

    def ping(self) -> int:
        """The rank's number; answers when the step before is done."""
        return self._rank

    def pid(self) -> int:
        return os.getpid()
