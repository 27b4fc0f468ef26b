"""Engines for one command: in this process, or over Ray actors on a Ray that lives as long as the command."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import ray

from dspark_ray.algorithm.cost_table import CostTable
from dspark_ray.config import AppConfig
from dspark_ray.engine.engine import Engine
from dspark_ray.offline import open_engine
from dspark_ray.workers.draft_worker import start_draft_worker
from dspark_ray.workers.ray_executor import RayExecutor

APP_NAME = "dspark-ray-cli"


@contextmanager
def ray_if_needed(executors: Sequence[str]) -> Iterator[None]:
    """A Ray of this command's own while `ray` is among the executors."""
    if "ray" not in executors:
        yield
        return
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


@asynccontextmanager
async def open_engine_on(executor: str, config: AppConfig, table: CostTable | None = None) -> AsyncIterator[Engine]:
    """A started engine over the `local` or the `ray` executor (within `ray_if_needed`)."""
    if executor == "local":
        async with open_engine(config, None, table) as engine:
            yield engine
        return
    drafters = _start_drafters(config)
    try:
        await asyncio.gather(*(handle.load.remote() for _, handle in drafters))
        async with open_engine(config, RayExecutor(config, APP_NAME, _unique_name(), drafters), table) as engine:
            yield engine
    finally:
        for _, handle in drafters:
            ray.kill(handle)


def _start_drafters(config: AppConfig) -> list[tuple[str, Any]]:
    count = 0 if config.drafter.kind == "none" else config.drafter.num_replicas
    ids = [_unique_name() for _ in range(count)]
    return [(drafter_id, start_draft_worker(config, APP_NAME, drafter_id)) for drafter_id in ids]


def _unique_name() -> str:
    """Ray frees the name of a killed actor only some time later."""
    return uuid.uuid4().hex[:8]
