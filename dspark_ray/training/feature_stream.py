"""Features on their way from the target actors to a trainer: a few batches in flight, nothing kept unless asked for.

The trainer pulls: a new batch is asked for only when one has been taken, so that a slow trainer holds the target actors
back. A target actor that dies is restarted by Ray, which runs its lost calls again.
"""

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import ray
import torch

from dspark_ray.training.batches import SupervisedBatch
from dspark_ray.training.config import TeacherConfig
from dspark_ray.training.features import FeatureExtractor
from dspark_ray.training.sequences import TrainingSequence
from dspark_ray.workers.names import NAMESPACE
from dspark_ray.workers.placement import thread_env

logger = logging.getLogger(__name__)

CacheKind = Literal["none", "memory", "disk"]


class FeatureWorker:
    """A FeatureExtractor as a Ray actor."""

    def __init__(self, config: TeacherConfig, target_layer_ids: tuple[int, ...]) -> None:
        torch.set_num_threads(config.num_threads)
        self._extractor = FeatureExtractor(config, target_layer_ids)

    def extract(self, sequences: list[TrainingSequence]) -> SupervisedBatch:
        return self._extractor.extract(sequences)

    def pid(self) -> int:
        return os.getpid()


def start_feature_workers(config: TeacherConfig, target_layer_ids: tuple[int, ...], run_name: str) -> list[Any]:
    """Start the target actors, owned by this process; Ray restarts those that die."""
    options: dict[str, Any] = {
        "namespace": NAMESPACE,
        "num_cpus": config.num_cpus,
        "num_gpus": config.num_gpus,
        "max_restarts": -1,
        "max_task_retries": -1,
        "runtime_env": {"env_vars": thread_env(config.num_threads, sees_gpus=config.num_gpus > 0)},
    }
    actor = ray.remote(FeatureWorker)
    return [
        actor.options(name=f"{run_name}/FeatureWorker-{index}", **options).remote(config, target_layer_ids)
        for index in range(config.num_feature_workers)
    ]


class FeatureSource(Protocol):
    """Where a batch of sequences becomes features. `submit` returns at once; `take` waits for what it returned."""

    def submit(self, sequences: list[TrainingSequence]) -> Any: ...

    def take(self, pending: Any) -> SupervisedBatch: ...


class RayFeatureSource:
    """Calls the target actors in turn; features come as object refs."""

    def __init__(self, workers: Sequence[Any], first: int = 0) -> None:
        self._workers, self._next = list(workers), first

    def submit(self, sequences: list[TrainingSequence]) -> Any:
        worker = self._workers[self._next % len(self._workers)]
        self._next += 1
        return worker.extract.remote(sequences)

    def take(self, pending: Any) -> SupervisedBatch:
        batch = ray.get(pending)
        assert isinstance(batch, SupervisedBatch)
        return batch


class LocalFeatureSource:
    """The target in this process, for training without Ray."""

    def __init__(self, extractor: FeatureExtractor) -> None:
        self._extractor = extractor

    def submit(self, sequences: list[TrainingSequence]) -> list[TrainingSequence]:
        return sequences

    def take(self, pending: list[TrainingSequence]) -> SupervisedBatch:
        return self._extractor.extract(pending)


class FeatureCache:
    """Features of whole batches by their members. Kind `none` keeps nothing; `disk` writes files under `folder`."""

    def __init__(self, kind: CacheKind, folder: Path | None = None) -> None:
        self._kind, self._folder = kind, folder
        self._memory: dict[tuple[int, ...], SupervisedBatch] = {}
        if kind == "disk":
            assert folder is not None, "a disk cache needs a folder"
            folder.mkdir(parents=True, exist_ok=True)

    def get(self, indices: tuple[int, ...]) -> SupervisedBatch | None:
        if self._kind == "disk" and self._path(indices).is_file():
            return SupervisedBatch(**torch.load(self._path(indices), weights_only=True))
        return self._memory.get(indices)

    def put(self, indices: tuple[int, ...], batch: SupervisedBatch) -> None:
        if self._kind == "memory":
            self._memory[indices] = batch
        elif self._kind == "disk":
            partial = self._path(indices).with_suffix(f".partial-{os.getpid()}")
            torch.save({name: getattr(batch, name) for name in SupervisedBatch.__slots__}, partial)
            os.replace(partial, self._path(indices))

    def _path(self, indices: tuple[int, ...]) -> Path:
        assert self._folder is not None
        return self._folder / f"{indices[0]}-{len(indices)}-{hash(indices) & 0xFFFFFFFFFFFF:012x}.pt"


def stream_features(
    sequences: Sequence[TrainingSequence],
    batches: Iterator[list[int]],
    source: FeatureSource,
    prefetch: int,
    cache: FeatureCache,
) -> Iterator[SupervisedBatch]:
    """Features of each batch of indices, in order, `prefetch` of them asked for ahead of their use."""
    waiting: deque[tuple[tuple[int, ...], Callable[[], SupervisedBatch]]] = deque()
    for indices in batches:
        waiting.append((key := tuple(indices), _ask(key, sequences, source, cache)))
        if len(waiting) > prefetch:
            yield waiting.popleft()[1]()
    while waiting:
        yield waiting.popleft()[1]()


def _ask(
    key: tuple[int, ...], sequences: Sequence[TrainingSequence], source: FeatureSource, cache: FeatureCache
) -> Callable[[], SupervisedBatch]:
    kept = cache.get(key)
    if kept is not None:
        return lambda: kept
    pending = source.submit([sequences[index] for index in key])

    def take() -> SupervisedBatch:
        batch = source.take(pending)
        cache.put(key, batch)
        return batch

    return take
