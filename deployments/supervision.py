"""Keeps one child actor alive: starts it, watches it, starts another when it is gone. Knows not what it does."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from ray.exceptions import RayActorError

logger = logging.getLogger("ray.serve")

CHECK_SECONDS = 0.5
MAX_FAILED_STARTS = 3  # in a row, before the replica that owns the actor calls itself unhealthy


class ActorSupervisor:
    """Owns an actor made by `create` (which returns a handle once the actor is of use)."""

    def __init__(self, what: str, create: Callable[[], Awaitable[Any]]) -> None:
        self._what = what
        self._create = create
        self._handle: Any = None
        self._failed_starts = 0
        self._last_failure = ""
        self._task: asyncio.Task[None] | None = None
        self.num_restarts = 0

    @property
    def handle(self) -> Any:
        """The actor of the moment; None between two."""
        return self._handle

    async def start(self) -> None:
        self._handle = await self._create()
        self._task = asyncio.create_task(self._watch(), name=f"watch-{self._what}")

    def check_health(self) -> None:
        """Raise if the actor could not be had for several tries: then the whole replica should be replaced."""
        if self._failed_starts >= MAX_FAILED_STARTS:
            raise RuntimeError(f"{self._what} failed to start {self._failed_starts} times: {self._last_failure}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._handle is not None:
            ray.kill(self._handle)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            if self._handle is None:
                await self._restart()
            elif not await self._alive():
                logger.warning("%s is gone; starting another", self._what)
                self._handle = None

    async def _alive(self) -> bool:
        # No time-out: a busy actor answers late, a dead one at once. One that hangs is for its callers to kill.
        try:
            await self._handle.ping.remote()
        except RayActorError:
            return False
        return True

    async def _restart(self) -> None:
        try:
            self._handle = await self._create()
        except Exception as error:
            self._failed_starts += 1
            self._last_failure = str(error)
            logger.warning("%s could not be started: %s", self._what, error)
            return
        self._failed_starts = 0
        self.num_restarts += 1
