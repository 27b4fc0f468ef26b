"""The DrafterServer deployment: each replica owns one DraftWorker and replaces it when it is lost."""

from importlib import import_module
from typing import Any

from ray import serve

from deployments.supervision import ActorSupervisor
from dspark_ray.config import AppConfig


class DrafterServer:
    """A place in the pool of drafters, which Serve scales and places. No request passes here."""

    async def __init__(self, config: AppConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        # Here and not at the top: composing the application must not need torch.
        start_draft_worker = import_module("dspark_ray.workers.draft_worker").start_draft_worker
        app_name = serve.get_replica_context().app_name

        async def create() -> Any:
            # With a new id: who held the old one must not find this one under it.
            worker = start_draft_worker(config, app_name)
            await worker.load.remote()
            return worker

        self._worker = ActorSupervisor("DraftWorker", create)
        await self._worker.start()

    async def stats(self) -> dict[str, Any] | None:
        """The worker's counts; None while it is being replaced."""
        handle = self._worker.handle
        return None if handle is None else await handle.stats.remote()

    async def check_health(self) -> None:
        self._worker.check_health()

    async def __del__(self) -> None:
        if hasattr(self, "_worker"):
            await self._worker.close()
