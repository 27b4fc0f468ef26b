"""The TargetServer deployment: a Serve shell around one TargetReplica. Its replica owns the placement group."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from importlib import import_module
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.backend import ModelCard
from deployments.serve_backend import StreamFailure
from dspark_ray.config import AppConfig
from dspark_ray.request import GenerationChunk, GenerationRequest


class TargetServer:
    """One engine and one target group. Serve routes to it only once the constructor has loaded the model."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: AppConfig, controller: DeploymentHandle, drafters: DeploymentHandle | None
    ) -> None:
        # The handles make Serve deploy these with the application; steps go to the actors themselves.
        self._peers = (controller, drafters)
        # Here and not at the top: composing the application must not need torch.
        replica_class = import_module("deployments.replica").TargetReplica
        context = serve.get_replica_context()
        self._replica = await replica_class.start(config, context.app_name, context.replica_id.unique_id)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk | StreamFailure, None]:
        # Only enqueues and reads its queue: Serve cancels this task with its client, never the step others share.
        async with aclosing(self._replica.generate(request)) as items:
            async for item in items:
                yield item

    async def card(self) -> ModelCard:
        return await self._replica.card()

    async def not_ready_because(self) -> str | None:
        return await self._replica.not_ready_because()

    async def stats(self) -> dict[str, Any]:
        return self._replica.stats()

    async def check_health(self) -> None:
        self._replica.check_health()

    async def __del__(self) -> None:
        if hasattr(self, "_replica"):
            await self._replica.close()
