"""Features on their way from the target actors to a trainer: a few batches in flight, nothing kept unless asked for.

The trainer pulls: a new batch is asked for only when one has been taken, so that a slow trainer holds the target actors
back. A target actor that dies is restarted by Ray, which runs its lost calls again.
"""

import logging
import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import ray
import torch

from dspark_ray.training.batches import PackedFeatures, SequenceFeatures, SupervisedBatch, supervised_batch
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

    def extract(self, sequences: list[TrainingSequence]) -> PackedFeatures:
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

    def take(self, pending: Any) -> PackedFeatures: ...


class RayFeatureSource:
    """Calls the target actors in turn; features come as object refs."""

    def __init__(self, workers: Sequence[Any], first: int = 0) -> None:
        self._workers, self._next = list(workers), first

    def submit(self, sequences: list[TrainingSequence]) -> Any:
        worker = self._workers[self._next % len(self._workers)]
        self._next += 1
        return worker.extract.remote(sequences)

    def take(self, pending: Any) -> PackedFeatures:
        features = ray.get(pending)
        assert isinstance(features, PackedFeatures)
        return features


class LocalFeatureSource:
    """The target in this process, for training without Ray."""

    def __init__(self, extractor: FeatureExtractor) -> None:
        self._extractor = extractor

    def submit(self, sequences: list[TrainingSequence]) -> list[TrainingSequence]:
        return sequences

    def take(self, pending: list[TrainingSequence]) -> PackedFeatures:
        return self._extractor.extract(pending)


class FeatureCache:
    """Features by sequence, over epochs. Kind `none` keeps nothing; `disk` writes a file a sequence under `folder`.

    Args: folder: of one target, its tapped layers and its corpus; what lies there is believed.
    """

    def __init__(self, kind: CacheKind, folder: Path | None = None) -> None:
        self._kind, self._folder = kind, folder
        self._memory: dict[int, SequenceFeatures] = {}
        if kind == "disk":
            assert folder is not None, "a disk cache needs a folder"
            folder.mkdir(parents=True, exist_ok=True)

    def get(self, index: int) -> SequenceFeatures | None:
        if self._kind == "disk" and (path := self._path(index)).is_file():
            return SequenceFeatures(**torch.load(path, weights_only=True))
        return self._memory.get(index)

    def put(self, index: int, features: SequenceFeatures) -> None:
        if self._kind == "memory":
            self._memory[index] = features
        elif self._kind == "disk":
            partial = self._path(index).with_suffix(f".partial-{os.getpid()}")
            torch.save({name: getattr(features, name).clone() for name in SequenceFeatures.__slots__}, partial)
            os.replace(partial, self._path(index))

    def _path(self, index: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{index:08d}.pt"


def stream_features(
    sequences: Sequence[TrainingSequence],
    batches: Iterator[list[int]],
    source: FeatureSource,
    prefetch: int,
    cache: FeatureCache,
) -> Iterator[SupervisedBatch]:
    """Features of each batch of indices, in order, `prefetch` of them asked for ahead of their use."""
    waiting: deque[_Request] = deque()
    for indices in batches:
        waiting.append(_Request(indices, sequences, source, cache))
        if len(waiting) > prefetch:
            yield waiting.popleft().take()
    while waiting:
        yield waiting.popleft().take()


class _Request:
    """One batch on its way: what the cache has, and what the target was asked for."""

    def __init__(
        self, indices: list[int], sequences: Sequence[TrainingSequence], source: FeatureSource, cache: FeatureCache
    ) -> None:
        self._indices, self._sequences, self._source, self._cache = indices, sequences, source, cache
        self._features = {index: kept for index in indices if (kept := cache.get(index)) is not None}
        self._missing = [index for index in indices if index not in self._features]
        self._pending = source.submit([sequences[index] for index in self._missing]) if self._missing else None

    def take(self) -> SupervisedBatch:
        if self._missing:
            new = self._source.take(self._pending).split()
            for index, features in zip(self._missing, new, strict=True):
                self._features[index] = features
                self._cache.put(index, features)
        return supervised_batch(
            [self._sequences[index] for index in self._indices], [self._features[index] for index in self._indices]
        )
