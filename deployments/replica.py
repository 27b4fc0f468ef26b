"""What runs inside a TargetServer replica: an engine on Ray with its leases. The deployment is a shell around it.

Imports the engine and so torch; `target.py` imports it only inside a replica: composing the application needs none.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from deployments.backend import ModelCard
from deployments.engine_backend import EngineBackend
from deployments.errors import UnavailableError
from deployments.serve_backend import StreamFailure
from dspark_ray.config import AppConfig
from dspark_ray.engine.engine import Engine
from dspark_ray.errors import DSparkError
from dspark_ray.models.resolve import resolve_model
from dspark_ray.request import GenerationChunk, GenerationRequest
from dspark_ray.workers.load_controller import ControllerClient, keep_leases, refresh_leases
from dspark_ray.workers.ray_executor import RayExecutor

logger = logging.getLogger("ray.serve")

FIRST_LEASE_SECONDS = 60.0  # for a drafter to load; the cost table should know what a draft takes


class TargetReplica:
    """One engine over one target group on Ray, and the task that keeps its leases."""

    def __init__(self, engine: Engine, backend: EngineBackend, client: ControllerClient) -> None:
        self._engine = engine
        self._backend = backend
        self._client = client
        self._leases: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, config: AppConfig, app_name: str, group: str) -> "TargetReplica":
        """Load the model, profile, begin to serve; returns when a request would be answered."""
        folder = await asyncio.to_thread(resolve_model, config.target.model)
        executor = RayExecutor(config, app_name, group)
        client = ControllerClient(app_name, group, budget_lag=config.verification.budget_lag)
        engine = Engine(config, executor, str(folder), client)
        drafters = asyncio.create_task(first_leases(config, client, executor))
        try:
            info = await engine.start(drafters_ready=drafters)
        except BaseException:
            drafters.cancel()
            await executor.close()
            raise
        replica = cls(engine, EngineBackend(engine, config.target.name, folder), client)
        replica._leases = asyncio.create_task(
            keep_leases(client, executor, lambda: engine.cost_table, info.num_draft_tokens), name="leases"
        )
        return replica

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk | StreamFailure, None]:
        try:
            async with aclosing(self._backend.generate(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except DSparkError as error:
            yield StreamFailure(error)

    async def card(self) -> ModelCard:
        return await self._backend.card()

    async def not_ready_because(self) -> str | None:
        """Why a request sent now would not be answered; None if it would."""
        try:
            await self._backend.check_ready()
        except UnavailableError as error:
            return str(error)
        return None

    def stats(self) -> dict[str, Any]:
        return self._engine.stats()

    def check_health(self) -> None:
        """Answers from what the loop last did, without waiting for it: busy is healthy, frozen and dead are not."""
        self._engine.check_health()

    async def close(self) -> None:
        if self._leases is not None:
            self._leases.cancel()
        await self._engine.close()
        await self._client.leave()


async def first_leases(config: AppConfig, client: ControllerClient, executor: RayExecutor) -> None:
    """Wait until a drafter has loaded and lend it to the executor; say so in the log if none comes in time."""
    deadline = time.monotonic() + FIRST_LEASE_SECONDS
    while config.drafter.kind != "none":
        reply = await client.refresh(executor.epoch, None, 0)
        if reply is not None and reply.drafter_ids:
            await refresh_leases(client, executor, None, 0)
            return
        if time.monotonic() > deadline:
            logger.warning("no drafter after %g s: decoding plainly until one comes", FIRST_LEASE_SECONDS)
            return
        await asyncio.sleep(0.2)
