"""The HTTP deployment: a shell around GenerationService. Its process never imports torch, and holds no model."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.api import create_api
from deployments.protocol import GenerateRequest
from deployments.serve_backend import ServeBackend
from deployments.service import GenerationService
from dspark_ray.config import AppConfig
from dspark_ray.request import GenerationChunk


@serve.ingress()
class Ingress:
    """Tokenises, checks and forwards to whichever target replica Serve picks; live from the start, model or not."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: AppConfig, target: DeploymentHandle, controller: DeploymentHandle
    ) -> None:
        backend = ServeBackend(target, controller, failover_seconds=config.serving.failover_seconds)
        backend.start()
        self._service = GenerationService(backend, config)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_api(self._service)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationChunk, None]:
        """For Python callers: `serve.get_app_handle(app).options(stream=True).generate.remote(request)`.

        Streams chunks of text, token ids and speculation counts, at most one per engine step. Raises RequestError,
        QueueFullError or UnavailableError.
        """
        async with aclosing(self._service.generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk
