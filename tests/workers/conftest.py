"""Ways to start drafters and engines on the Ray of the tests."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

from dspark_ray.config import AppConfig
from dspark_ray.engine.engine import Engine
from dspark_ray.engine.local_executor import LocalExecutor
from dspark_ray.workers.draft_worker import start_draft_worker
from dspark_ray.workers.ray_executor import RayExecutor
from tests.workers.harness import APP, RayEngine, collect_all


@pytest.fixture
def make_config(fixtures_dir: Path) -> Callable[..., AppConfig]:
    """Configuration for the tiny target of the repository; sections can be overridden."""

    def make(kind: str = "dspark", policy: str = "static", **sections: dict[str, Any]) -> AppConfig:
        target, drafter, engine = (sections.get(name, {}) for name in ("target", "drafter", "engine"))
        folder = {"dspark": "draft_vanilla", "autoregressive": "draft_autoregressive"}.get(kind)
        model = str(fixtures_dir / folder) if folder else None
        return AppConfig.model_validate(
            {
                "target": {
                    "model": str(fixtures_dir / "target"),
                    "dtype": "float32",
                    "device": "cpu",
                    "num_threads": 1,
                    "num_cpus": 0.5,
                    **target,
                },
                "drafter": {
                    "kind": kind,
                    "model": model,
                    "dtype": "float32",
                    "device": "cpu",
                    "num_cpus": 0.1,
                    **drafter,
                },
                "verification": {"policy": policy, "static_len": 3},
                "engine": {"page_size": 4, "num_pages": 400, "max_num_seqs": 16, **engine},
            }
        )

    return make


@pytest.fixture
def ray_engine(local_ray: None) -> Callable[..., Any]:
    """An async context: an engine over Ray with `num_drafters` loaded DraftWorkers; all is gone afterwards."""

    @asynccontextmanager
    async def make(config: AppConfig, num_drafters: int, group: str = "test") -> AsyncIterator[RayEngine]:
        drafters = [(f"{group}-{i}", start_draft_worker(config, APP, f"{group}-{i}")) for i in range(num_drafters)]
        executor = RayExecutor(config, APP, group, drafters)
        engine = Engine(config, executor, config.target.model)
        try:
            await asyncio.gather(*(handle.load.remote() for _, handle in drafters))
            await engine.start()
            yield RayEngine(engine, executor, dict(drafters))
        finally:
            await engine.close()
            for _, handle in drafters:
                ray.kill(handle)

    return make


@pytest.fixture
def local_tokens() -> Callable[..., dict[str, list[int]]]:
    """What the same requests give in one process."""

    def run(config: AppConfig, requests: Any) -> dict[str, list[int]]:
        async def main() -> dict[str, list[int]]:
            engine = Engine(config, LocalExecutor(config), config.target.model)
            await engine.start()
            try:
                return await collect_all(engine, requests)
            finally:
                await engine.close()

        return asyncio.run(main())

    return run


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """Poll until `condition()` holds and return its value; fail after `seconds`."""

    def wait(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < deadline, "did not happen in time"
            time.sleep(0.05)
        return value

    return wait
