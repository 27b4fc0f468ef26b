"""The ControllerServer deployment: owns the LoadController actor that everyone finds by name, and replaces it."""

from typing import Any

from ray import serve

from deployments.supervision import ActorSupervisor
from dspark_ray.config import AppConfig
from dspark_ray.workers.load_controller import start_controller


class ControllerServer:
    """Keeps the controller alive and shows its picture. Reports and leases go to the actor itself."""

    async def __init__(self, config: AppConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        app_name = serve.get_replica_context().app_name

        async def create() -> Any:
            handle = start_controller(app_name)
            await handle.ping.remote()
            return handle

        self._controller = ActorSupervisor("LoadController", create)
        await self._controller.start()

    async def stats(self) -> dict[str, Any] | None:
        """Leases, loads, utilisation and totals of the cluster; None while the controller is being replaced."""
        handle = self._controller.handle
        return None if handle is None else await handle.stats.remote()

    async def check_health(self) -> None:
        self._controller.check_health()

    async def __del__(self) -> None:
        if hasattr(self, "_controller"):
            await self._controller.close()
