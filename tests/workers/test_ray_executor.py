"""The engine over Ray: the same tokens as in one process, and what happens when actors die."""

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import ray
from ray.util import list_named_actors, placement_group_table

from dspark_ray.config import AppConfig
from dspark_ray.workers.names import NAMESPACE, draft_worker_name, target_worker_name
from tests.workers.harness import APP, collect_all, make_requests, until

pytestmark = pytest.mark.ray
MakeConfig = Callable[..., AppConfig]
SEEDED = {"temperature": 1.0, "seed": 11}


def actor_names() -> set[str]:
    return {actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE}


def standing_placement_groups() -> list[str]:
    return [name for name, group in placement_group_table().items() if group["state"] != "REMOVED"]


def kill_process(pid: int) -> None:
    """End a process that the test has stopped; Ray may have been quicker."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("kind", ["dspark", "autoregressive"])
def test_tokens_over_ray_equal_those_in_one_process(
    make_config: MakeConfig, ray_engine: Any, local_tokens: Any, kind: str
) -> None:
    config = make_config(kind)
    greedy, seeded = make_requests(8), make_requests(8, **SEEDED)

    async def main() -> tuple[list[dict[str, list[int]]], dict[str, Any]]:
        async with ray_engine(config, 2) as running:
            tokens = [await collect_all(running.engine, requests) for requests in (greedy, seeded)]
            return tokens, running.engine.stats()

    tokens, stats = asyncio.run(main())
    assert tokens == [local_tokens(config, greedy), local_tokens(config, seeded)]
    assert stats["drafted"] > stats["admitted"] > 0
    assert stats["executor"]["lost_drafters"] == []


def test_an_adaptive_engine_profiles_its_drafter_too_and_leaves_nothing_behind(
    make_config: MakeConfig, ray_engine: Any, local_tokens: Any, eventually: Any
) -> None:
    config, requests = make_config("ngram", policy="adaptive", engine={"max_num_seqs": 2}), make_requests(4)

    async def main() -> tuple[dict[str, list[int]], dict[str, Any]]:
        async with ray_engine(config, 1, group="leak") as running:
            assert standing_placement_groups()
            return await collect_all(running.engine, requests), running.engine.stats()

    tokens, stats = asyncio.run(main())
    assert tokens == local_tokens(make_config("ngram"), requests)
    assert stats["cost_table"]["draft_seconds"] > 0
    assert stats["draft_budget"] is not None
    eventually(lambda: not any("leak" in name for name in actor_names()))
    eventually(lambda: not standing_placement_groups())


@pytest.mark.parametrize("where", ["fixture", pytest.param("golden", marks=pytest.mark.slow)])
def test_two_ranks_give_the_tokens_of_one_also_when_one_is_killed(
    where: str, make_config: MakeConfig, ray_engine: Any, local_tokens: Any, request: pytest.FixtureRequest
) -> None:
    target: dict[str, Any] = {}
    drafter: dict[str, Any] = {}
    if where == "golden":
        golden = request.getfixturevalue("golden_dir")
        target, drafter = {"model": str(golden / "target_qwen3")}, {"model": str(golden / "draft_vanilla")}
    single = make_config(target=target, drafter=drafter)
    double = make_config(target={**target, "tensor_parallel_size": 2}, drafter=drafter)
    greedy, seeded = make_requests(8, max_tokens=60), make_requests(8, **SEEDED)

    async def main() -> tuple[list[dict[str, list[int]]], set[str], dict[str, Any]]:
        async with ray_engine(double, 1, group="tp") as running:
            names = actor_names()
            tokens = [await collect_all(running.engine, seeded)]
            everyone = asyncio.create_task(collect_all(running.engine, greedy))
            emitted = running.engine.totals.emitted
            await until(lambda: running.engine.totals.emitted > emitted + 40)
            ray.kill(ray.get_actor(target_worker_name(APP, "tp", 1), NAMESPACE))
            tokens.append(await asyncio.wait_for(everyone, 120))
            return tokens, names, running.engine.stats()

    tokens, names, stats = asyncio.run(main())
    assert tokens == [local_tokens(single, seeded), local_tokens(single, greedy)]
    assert {target_worker_name(APP, "tp", rank) for rank in (0, 1)} <= names
    assert draft_worker_name(APP, "tp-0") in names
    assert stats["rebuilds"] == 1
    assert stats["executor"]["epoch"] == 2
    assert len(stats["executor"]["drafters"]) == 1, "the drafter outlives the group"


def test_killed_and_stalled_drafters_cost_no_token_and_their_requests_move_on(
    make_config: MakeConfig, ray_engine: Any, local_tokens: Any
) -> None:
    config, requests = make_config(drafter={"step_timeout_seconds": 1.0}), make_requests(8, max_tokens=100)

    async def main() -> tuple[dict[str, list[int]], dict[str, Any]]:
        async with ray_engine(config, 2) as running:
            totals = running.engine.totals
            stalls = await running.drafters["test-1"].pid.remote()
            everyone = asyncio.create_task(collect_all(running.engine, requests))
            await until(lambda: totals.emitted > 40)
            ray.kill(running.drafters["test-0"])
            await until(lambda: running.executor.lost_drafters == ("test-0",))
            drafted = totals.drafted
            await until(lambda: totals.drafted > drafted + 40)
            os.kill(stalls, signal.SIGSTOP)
            try:
                return await asyncio.wait_for(everyone, 60), running.engine.stats()
            finally:
                kill_process(stalls)

    tokens, stats = asyncio.run(main())
    assert tokens == local_tokens(config, requests)
    assert stats["executor"]["lost_drafters"] == ["test-0", "test-1"]
    assert stats["executor"]["drafters"] == {}
    assert stats["rebuilds"] == stats["aborted"] == 0, "a lost drafter must not cost the group, nor a request"


def test_a_frozen_rank_is_found_by_the_watchdog(make_config: MakeConfig, ray_engine: Any, local_tokens: Any) -> None:
    config = make_config("none", engine={"watchdog_seconds": 3.0})
    requests = make_requests(4, max_tokens=40)

    async def main() -> tuple[dict[str, list[int]], dict[str, Any]]:
        async with ray_engine(config, 0) as running:
            rank = ray.get_actor(target_worker_name(APP, "test", 0), NAMESPACE)
            pid = await rank.pid.remote()
            everyone = asyncio.create_task(collect_all(running.engine, requests))
            await until(lambda: running.engine.totals.emitted > 20)
            os.kill(pid, signal.SIGSTOP)
            try:
                return await asyncio.wait_for(everyone, 120), running.engine.stats()
            finally:
                kill_process(pid)

    tokens, stats = asyncio.run(main())
    assert tokens == local_tokens(config, requests)
    assert stats["rebuilds"] == 1
