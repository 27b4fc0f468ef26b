"""DraftWorker as a plain class: it drafts, counts, and survives a failing drafter."""

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from dspark_ray.config import AppConfig
from dspark_ray.engine.batch import DraftPlan, FeatureBatch, empty_feature_batch
from dspark_ray.engine.profiler import greedy_columns
from dspark_ray.errors import ConfigError
from dspark_ray.workers.draft_worker import DraftWorker

TOKENS = np.array([1, 2, 3, 4, 1, 2, 3], dtype=np.int64)


def features(token_ids: np.ndarray = TOKENS) -> FeatureBatch:
    """One request that has just been prefilled and wants a draft after anchor 4."""
    return replace(
        empty_feature_batch(),
        step=1,
        request_ids=("a",),
        start_positions=np.zeros(1, dtype=np.int64),
        counts=np.array([len(token_ids)]),
        token_ids=token_ids,
        anchors=np.array([4]),
        drafts=np.array([True]),
        num_admitted=np.zeros(1, dtype=np.int64),
        num_accepted=np.zeros(1, dtype=np.int64),
        sampling=greedy_columns(1),
    )


@pytest.fixture
def worker(make_config: Callable[..., AppConfig]) -> DraftWorker:
    worker = DraftWorker(make_config("ngram"), None, "d0")
    assert worker.load() == 4
    return worker


def test_it_drafts_and_says_how_long_it_took(worker: DraftWorker) -> None:
    batch = worker.propose(DraftPlan(1), features())
    assert batch.request_ids == ("a",)
    assert batch.tokens[0, :3].tolist() == [1, 2, 3]
    assert batch.draft_seconds > 0
    assert worker.stats()["drafted"] == int(batch.num_drafts.sum()) > 0
    assert worker.stats()["busy_seconds"] > 0


def test_a_step_without_rows_only_tells_who_is_gone(worker: DraftWorker) -> None:
    worker.propose(DraftPlan(1), features())
    assert len(worker.propose(DraftPlan(2, dropped=("a", "never-seen")), empty_feature_batch())) == 0
    worker.forget(("a",))
    assert worker.stats()["failed"] == 0


def test_a_failing_drafter_gives_no_drafts_and_logs_once(worker: DraftWorker, caplog: pytest.LogCaptureFixture) -> None:
    broken = replace(features(), request_ids=("a", "b"))
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            batch = worker.propose(DraftPlan(1), broken)
            assert len(batch) == 0
            assert batch.num_drafts.sum() == 0
    assert worker.stats()["failed"] == 3
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1
    assert len(worker.propose(DraftPlan(2), features())) == 1, "the next good step drafts again"


def test_a_worker_without_a_drafter_is_a_configuration_error(make_config: Callable[..., AppConfig]) -> None:
    with pytest.raises(ConfigError, match="'none'"):
        DraftWorker(make_config("none"), None, "d0").load()
