"""A drafter as a Ray actor: a thin shell that calls one Drafter and tells the controller that it lives.

Knows nothing of target groups: whoever holds a lease calls `propose`, and request ids keep callers apart.
"""

import logging
import os
import threading
import time
import uuid
from dataclasses import replace
from typing import Any

import ray
import torch

from dspark_ray.algorithm.proposal import DraftBatch
from dspark_ray.config import AppConfig
from dspark_ray.engine.batch import DraftPlan, FeatureBatch, empty_feature_batch
from dspark_ray.engine.drafters.assemble import empty_draft_batch
from dspark_ray.engine.drafters.base import Drafter
from dspark_ray.engine.drafters.factory import build_drafter
from dspark_ray.engine.profiler import profile_drafter
from dspark_ray.errors import ConfigError
from dspark_ray.workers.names import NAMESPACE, controller_name, draft_worker_name
from dspark_ray.workers.placement import thread_env

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0


class DraftWorker:
    """Runs one Drafter. `load` before the first `propose`; from then on it sends heartbeats to the app's controller
    (with app_name None to nobody)."""

    def __init__(self, config: AppConfig, app_name: str | None, drafter_id: str) -> None:
        self._config, self._app_name, self._drafter_id = config, app_name, drafter_id
        self._drafter: Drafter | None = None
        self._num_calls = self._num_drafted = self._num_failed = 0
        self._busy_seconds = 0.0

    def load(self) -> int:
        """Build the drafter and start the heartbeat; returns num_draft_tokens."""
        torch.set_num_threads(self._config.drafter.num_threads)
        drafter = build_drafter(self._config)
        if drafter is None:
            raise ConfigError(
                f"drafter.kind is {self._config.drafter.kind!r}: there is nothing for a DraftWorker to run"
            )
        self._drafter = drafter
        if self._app_name is not None:
            threading.Thread(
                target=self._send_heartbeats, args=(self._app_name,), name="heartbeat", daemon=True
            ).start()
        return drafter.num_draft_tokens

    def propose(self, plan: DraftPlan, features: FeatureBatch) -> DraftBatch:
        """Drafts for the rows of `features`. A failing drafter gives no drafts (output stays the same) and says so
        in the log once; `stats` counts the rest."""
        assert self._drafter is not None, "load comes before propose"
        started = time.perf_counter()
        try:
            batch = self._drafter.propose(plan, features)
        except Exception:
            if self._num_failed == 0:
                logger.exception(
                    "drafter %s failed in step %d; its requests decode plainly", self._drafter_id, plan.step
                )
            self._num_failed += 1
            batch = empty_draft_batch(self._drafter.num_draft_tokens)
        seconds = time.perf_counter() - started
        self._busy_seconds += seconds
        self._num_calls += 1
        self._num_drafted += int(batch.num_drafts.sum())
        return replace(batch, draft_seconds=seconds)

    def forget(self, request_ids: tuple[str, ...]) -> None:
        """Free what is kept of these requests: whoever sent them has left."""
        self.propose(DraftPlan(0, dropped=request_ids), empty_feature_batch())

    def profile(self, feature_size: int, dtype: torch.dtype) -> float:
        """Seconds of one draft block for one request."""
        assert self._drafter is not None, "load comes before profile"
        return profile_drafter(self._drafter, feature_size, dtype)

    def ping(self) -> str:
        return self._drafter_id

    def pid(self) -> int:
        return os.getpid()

    def stats(self) -> dict[str, Any]:
        return {
            "drafter_id": self._drafter_id,
            "calls": self._num_calls,
            "drafted": self._num_drafted,
            "failed": self._num_failed,
            "busy_seconds": self._busy_seconds,
        }

    def _send_heartbeats(self, app_name: str) -> None:
        """Tell the controller, found by name each time, how busy this drafter was. No controller: try again later."""
        capacity = self._config.engine.max_num_seqs
        busy, since = self._busy_seconds, time.monotonic()
        while True:
            now = time.monotonic()
            utilisation = (self._busy_seconds - busy) / max(now - since, HEARTBEAT_SECONDS / 2)
            busy, since = self._busy_seconds, now
            try:
                controller = ray.get_actor(controller_name(app_name), NAMESPACE)
                ray.get(controller.heartbeat.remote(self._drafter_id, capacity, min(utilisation, 1.0)), timeout=5)
            except (ray.exceptions.RayError, ValueError) as error:
                logger.debug("no heartbeat of drafter %s: %s", self._drafter_id, error)
            time.sleep(HEARTBEAT_SECONDS)


def start_draft_worker(config: AppConfig, app_name: str, drafter_id: str | None = None) -> Any:
    """Start a DraftWorker owned by this process and return its handle; await its `load` before use.

    It is never restarted by Ray: a new one has a new id and gets leases of its own.
    """
    drafter = config.drafter
    drafter_id = drafter_id or uuid.uuid4().hex[:8]
    sees_gpus = drafter.num_gpus > 0 or drafter.device == "cuda"
    options = {
        "name": draft_worker_name(app_name, drafter_id),
        "namespace": NAMESPACE,
        "num_cpus": drafter.num_cpus,
        "num_gpus": drafter.num_gpus,
        "max_restarts": 0,
        "max_task_retries": 0,
        "runtime_env": {"env_vars": thread_env(drafter.num_threads, sees_gpus=sees_gpus)},
    }
    return ray.remote(DraftWorker).options(**options).remote(config, app_name, drafter_id)
