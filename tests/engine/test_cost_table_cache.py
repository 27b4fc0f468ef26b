"""A profiled cost table is found again at the next start of the same engine, and only of the same."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dspark_ray.algorithm.cost_table import CostTable
from dspark_ray.config import AppConfig
from dspark_ray.engine.batch import TargetInfo
from dspark_ray.engine.cost_table_cache import cached_path, obtain_cost_table

TABLE = CostTable((1, 8), (0.01, 0.02))
INFO = TargetInfo(
    10,
    16,
    128,
    64,
    5,
    "float32",
    "cpu",
    {"model": "m", "dtype": "float32", "device": "cpu", "tensor_parallel_size": "1"},
)


class Profiler:
    """Counts how often it had to measure."""

    def __init__(self) -> None:
        self.runs = 0

    async def profile(self) -> CostTable:
        self.runs += 1
        return TABLE


def test_the_second_start_reads_what_the_first_measured(tmp_path: Path) -> None:
    profiler, path = Profiler(), tmp_path / "deep" / "table.json"
    for _ in range(2):
        assert asyncio.run(obtain_cost_table(AppConfig(), path, profiler.profile)) == TABLE
    assert profiler.runs == 1


def test_a_damaged_file_is_measured_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    profiler, path = Profiler(), tmp_path / "table.json"
    path.write_text("{}")
    assert asyncio.run(obtain_cost_table(AppConfig(), path, profiler.profile)) == TABLE
    assert "damaged" in caplog.text
    assert CostTable.load(path) == TABLE


def test_the_cache_can_be_switched_off(tmp_path: Path) -> None:
    profiler, path = Profiler(), tmp_path / "table.json"
    config = AppConfig.model_validate({"verification": {"cache_cost_table": False}})
    asyncio.run(obtain_cost_table(config, path, profiler.profile))
    assert not path.exists()


def test_another_engine_has_another_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = AppConfig()
    variants: list[Callable[[], Path]] = [
        lambda: cached_path(config, INFO, "local"),
        lambda: cached_path(config, INFO, "ray"),
        lambda: cached_path(config, replace(INFO, num_draft_tokens=4), "local"),
        lambda: cached_path(config, replace(INFO, provenance={**INFO.provenance, "torch": "2"}), "local"),
        lambda: cached_path(AppConfig.model_validate({"drafter": {"kind": "ngram"}}), INFO, "local"),
    ]
    assert len({variant() for variant in variants}) == len(variants)
    assert cached_path(config, INFO, "local") == cached_path(config, INFO, "local")
