"""An engine for one command: in this process, or over Ray actors on a Ray that lives as long as the command."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import ray

from dspark_ray.algorithm.cost_table import CostTable
from dspark_ray.config import AppConfig
from dspark_ray.engine.engine import Engine
from dspark_ray.offline import open_engine
from dspark_ray.workers.draft_worker import start_draft_worker
from dspark_ray.workers.ray_executor import RayExecutor

APP_NAME = "dspark-ray-cli"


@asynccontextmanager
async def open_engine_on(executor: str, config: AppConfig, table: CostTable | None = None) -> AsyncIterator[Engine]:
    """A started engine over the `local` or the `ray` executor."""
    if executor == "local":
        async with open_engine(config, None, table) as engine:
            yield engine
        return
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    try:
        drafters = await _start_drafters(config)
        async with open_engine(config, RayExecutor(config, APP_NAME, "group-0", drafters), table) as engine:
            yield engine
    finally:
        ray.shutdown()


async def _start_drafters(config: AppConfig) -> list[tuple[str, Any]]:
    if config.drafter.kind == "none":
        return []
    ids = [f"drafter-{index}" for index in range(config.drafter.num_replicas)]
    handles = [start_draft_worker(config, APP_NAME, drafter_id) for drafter_id in ids]
    await asyncio.gather(*(handle.load.remote() for handle in handles))
    return list(zip(ids, handles, strict=True))
