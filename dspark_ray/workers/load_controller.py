"""The central actor around ClusterPlanner, and the client through which an engine hears of it off the step path.

Imports no torch. The actor knows no handles: drafters are leased by id and found by name; a lease keeps nobody alive.
"""

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from dspark_ray.algorithm.cost_table import CostTable
from dspark_ray.engine.draft_budget import LoadReport
from dspark_ray.workers.cluster_planner import BudgetReply, ClusterPlanner, LeaseReply
from dspark_ray.workers.names import NAMESPACE, controller_name, draft_worker_name

logger = logging.getLogger(__name__)

CALL_SECONDS = 5.0  # an answer that takes longer is given up
LEASE_SECONDS = 1.0
RECENT_REPLIES = 16


class LoadController:
    """ClusterPlanner with a clock. Restarted empty; groups and drafters enter again with their next call."""

    def __init__(self) -> None:
        self._planner = ClusterPlanner()
        self._instance = uuid.uuid4().hex[:8]

    def refresh(
        self, group: str, epoch: int, cost_table: CostTable | None, num_draft_tokens: int, lost: tuple[str, ...] = ()
    ) -> LeaseReply:
        """Enter or refresh a group, hear which drafters it saw die, and answer with its leases."""
        now = time.monotonic()
        for drafter_id in lost:
            self._planner.remove_drafter(drafter_id)
        self._planner.register_target(group, epoch, cost_table, num_draft_tokens, now)
        return self._planner.lease(group, now)

    def leave(self, group: str) -> None:
        """A group that closes: its drafters are free at once."""
        self._planner.remove_target(group)

    def heartbeat(self, drafter_id: str, capacity: float, utilisation: float) -> None:
        self._planner.heartbeat_drafter(drafter_id, capacity, utilisation, time.monotonic())

    def report(self, group: str, epoch: int, report: LoadReport) -> BudgetReply | None:
        return self._planner.report(group, epoch, report, time.monotonic())

    def stats(self) -> dict[str, Any]:
        """The planner's picture; `instance` changes when the controller was restarted."""
        return {"instance": self._instance, **self._planner.stats(time.monotonic())}

    def ping(self) -> str:
        return self._instance


def start_controller(app_name: str) -> Any:
    """The app's controller, started (owned by this process) unless it is there; returns its handle.

    Ray restarts it, empty, when it crashes. It needs no CPU slot and sees no GPU.
    """
    options = {
        "name": controller_name(app_name),
        "namespace": NAMESPACE,
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": 0,
        "runtime_env": {"env_vars": {"CUDA_VISIBLE_DEVICES": ""}},
    }
    return ray.remote(LoadController).options(**options).remote()


class ControllerClient:
    """An engine's line to the controller: the BudgetSource of engine/draft_budget.py over Ray.

    Never waits and never raises on the step path. The actor is looked up by name, and again after any failure; while it
    is away there is no budget (the engine estimates its own) and no change of leases.
    """

    def __init__(self, app_name: str, group: str, *, budget_lag: int, max_age_seconds: float = 2.0) -> None:
        self._app_name, self._group = app_name, group
        self._lag, self._max_age = budget_lag, max_age_seconds
        self._epoch = 0
        self._handle: Any = None
        self._replies: deque[tuple[float, BudgetReply]] = deque(maxlen=RECENT_REPLIES)
        self._last_step = 0
        self._in_flight: asyncio.Task[None] | None = None
        self._reachable = True
        self.num_reports = self.num_skipped = 0

    def report(self, report: LoadReport) -> None:
        """Send a step's report and return at once; skipped while the one before is under way."""
        self._last_step = report.step
        if self._handle is None or not self.idle:
            self.num_skipped += 1
            return
        self.num_reports += 1
        self._in_flight = asyncio.get_running_loop().create_task(self._send(report))

    def budget(self) -> int | None:
        """The budget for the step after the last reported one, from survivals at least `budget_lag` steps older (paper
        5.2); None if no answer is that old and still fresh."""
        oldest = time.monotonic() - self._max_age
        for received, reply in reversed(self._replies):
            if received >= oldest and reply.epoch == self._epoch and reply.step <= self._last_step + 1 - self._lag:
                return reply.budget
        return None

    @property
    def reply_age_seconds(self) -> float | None:
        """Age of the newest answer; None before the first."""
        return time.monotonic() - self._replies[-1][0] if self._replies else None

    @property
    def idle(self) -> bool:
        """Whether no report is under way."""
        return self._in_flight is None or self._in_flight.done()

    async def refresh(
        self, epoch: int, cost_table: CostTable | None, num_draft_tokens: int, lost: tuple[str, ...] = ()
    ) -> LeaseReply | None:
        """Register (again) and fetch the leases; None while the controller is away. Off the step path."""
        if epoch != self._epoch:
            self._epoch, self._last_step = epoch, 0
            self._replies.clear()
        return await self._call("refresh", self._group, epoch, cost_table, num_draft_tokens, lost)

    async def leave(self) -> None:
        """Say that the group closes."""
        await self._call("leave", self._group)

    async def stats(self) -> dict[str, Any] | None:
        """The cluster's picture, None while the controller is away."""
        return await self._call("stats")

    async def drafter_handles(self, drafter_ids: tuple[str, ...]) -> list[tuple[str, Any]]:
        """(id, handle) of those that are alive, found by name."""
        return await asyncio.to_thread(find_draft_workers, self._app_name, drafter_ids)

    async def _send(self, report: LoadReport) -> None:
        reply = await self._call("report", self._group, self._epoch, report)
        if reply is not None:
            self._replies.append((time.monotonic(), reply))

    async def _call(self, method: str, *args: Any) -> Any:
        """The actor's answer, or None after any failure, which is logged once until it is reached again."""
        handle = self._handle
        try:
            if handle is None:
                handle = await asyncio.to_thread(ray.get_actor, controller_name(self._app_name), NAMESPACE)
                self._handle = handle
            reply = await asyncio.wait_for(getattr(handle, method).remote(*args), CALL_SECONDS)
        except (RayError, ValueError, TimeoutError) as error:
            if self._handle is handle:  # a late failure must not undo a newer look-up
                self._handle = None
            if self._reachable:
                logger.warning("controller %s is away: %s", controller_name(self._app_name), type(error).__name__)
            self._reachable = False
            return None
        if not self._reachable:
            logger.info("controller %s is back", controller_name(self._app_name))
        self._reachable = True
        return reply


def find_draft_workers(app_name: str, drafter_ids: tuple[str, ...]) -> list[tuple[str, Any]]:
    """Handles by name, of those that are there; looked up each time, so that no dead one is kept."""
    found = []
    for drafter_id in drafter_ids:
        try:
            found.append((drafter_id, ray.get_actor(draft_worker_name(app_name, drafter_id), NAMESPACE)))
        except (RayError, ValueError) as error:
            logger.debug("drafter %s is leased but not to be found: %s", drafter_id, error)
    return found


class LeaseHolder(Protocol):
    """What `keep_leases` needs of an executor."""

    @property
    def epoch(self) -> int: ...

    @property
    def lost_drafters(self) -> tuple[str, ...]: ...

    def set_drafters(self, drafters: list[tuple[str, Any]]) -> None: ...

    def rest_below(self, expected_accepts: float) -> None: ...


async def refresh_leases(
    client: ControllerClient, executor: LeaseHolder, cost_table: CostTable | None, num_draft_tokens: int
) -> bool:
    """One round between controller and executor; False while the controller is away (the leases at hand stay)."""
    reply = await client.refresh(executor.epoch, cost_table, num_draft_tokens, executor.lost_drafters)
    if reply is None:
        return False
    executor.set_drafters(await client.drafter_handles(reply.drafter_ids))
    executor.rest_below(reply.rest_below)
    return True


async def keep_leases(
    client: ControllerClient,
    executor: LeaseHolder,
    cost_table: Callable[[], CostTable | None],
    num_draft_tokens: int,
) -> None:
    """Refresh about once a second until cancelled. Run as a task of its own beside the engine."""
    while True:
        await refresh_leases(client, executor, cost_table(), num_draft_tokens)
        await asyncio.sleep(LEASE_SECONDS)
