"""The controller over Ray: budgets of the right age, leases, and life after the controller's death."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import ray

from dspark_ray.algorithm.cost_table import CostTable
from dspark_ray.config import AppConfig
from dspark_ray.engine.draft_budget import LoadReport
from dspark_ray.engine.engine import Engine
from dspark_ray.workers.draft_worker import start_draft_worker
from dspark_ray.workers.load_controller import ControllerClient, keep_leases, refresh_leases, start_controller
from dspark_ray.workers.names import NAMESPACE, controller_name
from dspark_ray.workers.ray_executor import RayExecutor
from tests.workers.harness import collect_all, make_requests, until

pytestmark = pytest.mark.ray
TABLE = CostTable((1, 64), (0.01, 0.011))
K = 3


def make_report(step: int) -> LoadReport:
    """Two requests with room for `step` (at most K) drafts each, so that a budget tells which step it came from."""
    return LoadReport(
        step=step,
        num_running=2,
        num_waiting=0,
        base_tokens=2,
        batch_tokens=4,
        num_sampling=2,
        survival=np.full((2, K), 0.9, dtype=np.float32),
        max_drafts=np.full(2, min(step, K)),
        step_seconds=0.01,
        draft_seconds=0.001,
        drafted=6,
        admitted=6,
        accepted=4,
        emitted=6,
    )


@asynccontextmanager
async def controller_of(app_name: str) -> AsyncIterator[Any]:
    handle = start_controller(app_name)
    await handle.ping.remote()
    try:
        yield handle
    finally:
        ray.kill(ray.get_actor(controller_name(app_name), NAMESPACE))


async def answered(client: ControllerClient, step: int) -> None:
    """Report a step and wait for the answer, which the step path never does."""
    reports = client.num_reports
    client.report(make_report(step))
    assert client.num_reports == reports + 1
    await until(lambda: (client.reply_age_seconds or 9.0) < 1.0 and client.idle)


def test_a_budget_rests_on_survivals_at_least_the_lag_old(local_ray: None) -> None:
    async def main() -> None:
        async with controller_of("lag"):
            client = ControllerClient("lag", "g0", budget_lag=2, max_age_seconds=60.0)
            assert client.budget() is None
            await client.refresh(1, TABLE, K)
            await answered(client, 1)
            assert client.budget() is None, "step 2 must not use the survivals of step 1"
            await answered(client, 2)
            assert client.budget() == 2, "step 3 uses those of step 1"
            await answered(client, 3)
            assert client.budget() == 4, "step 4 uses those of step 2"

    asyncio.run(main())


def test_an_old_answer_is_no_budget_and_a_new_epoch_has_none(local_ray: None) -> None:
    async def main() -> None:
        async with controller_of("age"):
            client = ControllerClient("age", "g0", budget_lag=1, max_age_seconds=0.3)
            await client.refresh(1, TABLE, K)
            await answered(client, 1)
            assert client.budget() is not None
            await asyncio.sleep(0.4)
            assert client.budget() is None
            await answered(client, 2)
            await client.refresh(2, TABLE, K)
            assert client.budget() is None

    asyncio.run(main())


def test_reporting_without_a_controller_neither_waits_nor_raises(local_ray: None) -> None:
    async def main() -> None:
        client = ControllerClient("nobody", "g0", budget_lag=2)
        assert await client.refresh(1, TABLE, K) is None
        started = time.monotonic()
        for step in range(100):
            client.report(make_report(step))
            assert client.budget() is None
        assert time.monotonic() - started < 0.5
        assert await client.stats() is None

    asyncio.run(main())


@pytest.mark.parametrize("restarts", [True, False])
def test_a_group_enters_again_after_the_controller_died(restarts: bool, local_ray: None) -> None:
    app = f"death-{restarts}"

    async def main() -> None:
        async with controller_of(app) as controller:
            client = ControllerClient(app, "g0", budget_lag=1)
            await client.refresh(1, TABLE, K)
            await answered(client, 1)
            before = await client.stats()
            assert before is not None
            ray.kill(controller, no_restart=not restarts)
            client.report(make_report(2))
            await until(lambda: client.idle)
            if not restarts:
                assert await client.refresh(1, TABLE, K) is None
                successor = start_controller(app)  # lives as long as its owner keeps this handle
                await successor.ping.remote()
            await until_refreshed(client)
            await answered(client, 3)
            assert client.budget() == 2 * K
            after = await client.stats()
            assert after is not None
            assert after["instance"] != before["instance"]
            assert after["groups"]["g0"]["step"] == 3

    asyncio.run(main())


async def until_refreshed(client: ControllerClient) -> None:
    async with asyncio.timeout(30):
        while await client.refresh(1, TABLE, K) is None:
            await asyncio.sleep(0.05)


def test_an_engine_drafts_through_its_leases_and_outlives_the_controller(
    local_ray: None, make_config: Callable[..., AppConfig], local_tokens: Any
) -> None:
    app, config = "cluster", make_config("ngram", policy="adaptive", engine={"max_num_seqs": 8})
    requests = make_requests(8, max_tokens=150)

    async def main() -> tuple[dict[str, list[int]], dict[str, Any], Any]:
        drafter = start_draft_worker(config, app, "d0")
        client = ControllerClient(app, "g0", budget_lag=config.verification.budget_lag)
        executor = RayExecutor(config, app, "g0")
        engine = Engine(config, executor, config.target.model, client)
        try:
            async with controller_of(app) as controller:
                await drafter.load.remote()
                await engine.start(TABLE)
                await until_leased(client, executor)
                leases = asyncio.create_task(keep_leases(client, executor, lambda: TABLE, K))
                everyone = asyncio.create_task(collect_all(engine, requests))
                await until(lambda: engine.budget.from_controller > 5)
                ray.kill(controller, no_restart=False)
                tokens = await everyone
                await until_leased(client, executor)  # both have entered again by themselves
                leases.cancel()
                await client.leave()
                return tokens, engine.stats(), await client.stats()
        finally:
            await engine.close()
            ray.kill(drafter)

    tokens, stats, cluster = asyncio.run(main())
    assert tokens == local_tokens(make_config("ngram"), requests)
    assert stats["drafted"] > 0
    assert stats["budgets"]["from_controller"] > 5
    assert stats["rebuilds"] == stats["aborted"] == 0
    assert "g0" not in cluster["groups"], "a group that left is gone at once"


async def until_leased(client: ControllerClient, executor: RayExecutor) -> None:
    async with asyncio.timeout(30):
        while not (await client.stats() or {"leases": {}})["leases"].get("g0"):
            await refresh_leases(client, executor, TABLE, K)
            await asyncio.sleep(0.1)
