"""Drafter training over Ray: the trainers as one group of Ray Train, fed by target actors of their own.

The state of the run lies in one file, on storage that this process and the first trainer share (as Ray Train asks of
its own storage). After a failure Ray Train starts the group anew, and every trainer goes on from that file.
"""

import logging
import shutil
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer, get_device
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.queue import Queue

from dspark_ray.errors import PlacementError, TrainingError
from dspark_ray.models.resolve import resolve_model
from dspark_ray.training.batches import endless_batches
from dspark_ray.training.config import TrainingConfig
from dspark_ray.training.draft_setup import DraftSetup
from dspark_ray.training.draft_trainer import DraftTrainer
from dspark_ray.training.feature_stream import RayFeatureSource, start_feature_workers, stream_features
from dspark_ray.training.local_training import feature_cache, new_trainer, validation_batches
from dspark_ray.training.sequences import TrainingSequence
from dspark_ray.training.training_loop import LoopHooks, TrainingRecord, run_training
from dspark_ray.workers.placement import LEAST_CPUS, describe_cluster, thread_env

logger = logging.getLogger(__name__)

STORAGE = "ray_train"  # what Ray Train writes of its own, below the run's folder; removed when the run has ended
Report = Callable[[TrainingRecord], None]


@dataclass(frozen=True, slots=True)
class TrainerJob:
    """What every trainer is sent. `sequences` and `validation` are object refs: each node fetches them once."""

    config: TrainingConfig
    setup: DraftSetup
    folder: Path
    sequences: Any
    validation: Any
    feature_workers: list[Any]
    news: Queue


def train_on_ray(
    config: TrainingConfig,
    setup: DraftSetup,
    sequences: Sequence[TrainingSequence],
    validation: Sequence[TrainingSequence],
    folder: Path,
    record: Report,
) -> DraftTrainer:
    """Train from the state in `folder`, or from the start; the state after the last step lies there at the end.

    Needs an initialised Ray. `record` is called in another thread. Raises PlacementError where the cluster has no room
    for the trainers and their target actors, TrainingError after more than `max_failures` failures of the group.
    """
    wait_for_room(config)
    folder, setup = folder.resolve(), _absolute(setup)
    with _feature_workers(config, setup) as workers, _listening(record) as news:
        job = TrainerJob(config, setup, folder, ray.put(list(sequences)), ray.put(list(validation)), workers, news)
        _fit(job)
    trainer = DraftTrainer(setup.build(), config.optimisation, torch.device("cpu"))
    trainer.load(folder)
    return trainer


def train_worker(loop_config: dict[str, TrainerJob]) -> None:
    """One trainer: what `train_locally` does, with its share of the sequences. The first one records and saves."""
    job = loop_config["job"]
    config, context = job.config, ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    torch.set_num_threads(config.trainer.num_threads)
    sequences, optimisation = ray.get(job.sequences), config.optimisation
    trainer = new_trainer(config, job.setup, sequences, job.folder, get_device(), worker=rank)
    source = RayFeatureSource(job.feature_workers, first=rank)
    order = endless_batches(sequences, optimisation.tokens_per_step, optimisation.seed, rank, world, skip=trainer.step)
    cache = feature_cache(config, job.folder)
    batches = stream_features(sequences, order, source, config.trainer.prefetch_batches, cache)
    held_out = validation_batches(config, ray.get(job.validation), source) if rank == 0 else []
    run_training(trainer, batches, held_out, _hooks(job) if rank == 0 else _SILENT)


def _hooks(job: TrainerJob) -> LoopHooks:
    return LoopHooks(job.news.put, lambda trainer: trainer.save(job.folder))


_SILENT = LoopHooks(lambda record: None, lambda trainer: None)


def wait_for_room(config: TrainingConfig) -> None:
    """Wait until all trainers and target actors could run at once; an autoscaler sees the request meanwhile.

    Raises PlacementError, with what was asked and what each node has, after `placement_timeout_seconds`.
    """
    trainer, teacher = config.trainer, config.teacher
    bundles = [trainer_resources(config)] * trainer.num_workers
    bundles += [_bundle(teacher.num_cpus, teacher.num_gpus)] * teacher.num_feature_workers
    group = placement_group(bundles, strategy="PACK")
    try:
        if not group.wait(trainer.placement_timeout_seconds):
            raise PlacementError(
                f"could not place {trainer.num_workers} trainer(s) and {teacher.num_feature_workers} target actor(s) "
                f"as {bundles} within {trainer.placement_timeout_seconds:g} s. {describe_cluster()} Lower "
                "trainer.num_workers, trainer.num_cpus, teacher.num_feature_workers or teacher.num_cpus, or add nodes."
            )
    finally:
        remove_placement_group(group)


def trainer_resources(config: TrainingConfig) -> dict[str, float]:
    """What one trainer reserves."""
    return _bundle(config.trainer.num_cpus, 1.0 if config.trainer.use_gpu else 0.0)


def _bundle(num_cpus: float, num_gpus: float) -> dict[str, float]:
    bundle = {"CPU": max(num_cpus, LEAST_CPUS)}
    return {**bundle, "GPU": num_gpus} if num_gpus else bundle


def _absolute(setup: DraftSetup) -> DraftSetup:
    """Ray's workers have a working directory of their own."""
    initial = setup.initial_drafter and str(resolve_model(setup.initial_drafter).resolve())
    return replace(setup, target_folder=str(Path(setup.target_folder).resolve()), initial_drafter=initial)


@contextmanager
def _feature_workers(config: TrainingConfig, setup: DraftSetup) -> Iterator[list[Any]]:
    """The target actors of one run; gone when it ends, however it ends."""
    teacher = config.teacher.model_copy(update={"model": setup.target_folder})
    workers = start_feature_workers(teacher, setup.target_layer_ids, f"train-{uuid.uuid4().hex[:8]}")
    try:
        yield workers
    finally:
        for worker in workers:
            ray.kill(worker)


@contextmanager
def _listening(record: Report) -> Iterator[Queue]:
    """A queue whose records reach `record` as they come, and all of them before this ends."""
    queue = Queue(actor_options={"num_cpus": 0})
    listener = threading.Thread(target=_listen, args=(queue, record), name="training-records", daemon=True)
    listener.start()
    try:
        yield queue
    finally:
        queue.put(None)
        listener.join()
        queue.shutdown(force=True)


def _listen(queue: Queue, record: Report) -> None:
    while (news := queue.get()) is not None:
        if isinstance(news, TrainingRecord):
            record(news)
        else:
            logger.warning("%s", news)


class FailureNotice(ray.train.UserCallback):
    """Says in one line which trainers failed; Ray Train goes on from the last checkpoint, or gives up."""

    def __init__(self, news: Queue) -> None:
        self._news = news

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        causes = _causes(worker_exceptions)
        self._news.put(f"training was interrupted ({causes}); going on from the last checkpoint if restarts are left")


def _causes(failures: dict[int, Exception]) -> str:
    first_lines = {rank: str(error).strip().partition("\n")[0] for rank, error in failures.items()}
    return "; ".join(f"trainer {rank}: {line or type(failures[rank]).__name__}" for rank, line in first_lines.items())


def _fit(job: TrainerJob) -> None:
    storage, trainer = job.folder / STORAGE, job.config.trainer
    env = thread_env(trainer.num_threads, sees_gpus=trainer.use_gpu)
    group = TorchTrainer(
        train_worker,
        train_loop_config={"job": job},
        scaling_config=ray.train.ScalingConfig(
            num_workers=trainer.num_workers,
            use_gpu=trainer.use_gpu,
            resources_per_worker=trainer_resources(job.config),
        ),
        run_config=ray.train.RunConfig(  # type: ignore[call-arg]
            name=f"run-{uuid.uuid4().hex[:8]}",
            storage_path=str(storage),
            failure_config=ray.train.FailureConfig(max_failures=trainer.max_failures),
            callbacks=[FailureNotice(job.news)],  # type: ignore[list-item]  # typed for the API before
            worker_runtime_env={"env_vars": env},
            logging_config=ray.train.LoggingConfig(log_level="WARNING"),
        ),
    )
    try:
        with _interruptible():
            group.fit()
    except ray.train.TrainingFailedError as error:
        failures = getattr(error, "worker_failures", None)
        raise TrainingError(
            f"training over Ray failed more than {trainer.max_failures} time(s) (trainer.max_failures): "
            f"{_causes(failures) if failures else error}. The last checkpoint is kept in {job.folder}: mend the cause "
            "and run the same command to go on."
        ) from error
    finally:
        shutil.rmtree(storage, ignore_errors=True)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C as everywhere else: Ray Train sets a handler that ends the process with status 0, and leaves it set."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as end:
        raise KeyboardInterrupt from end
    finally:
        with suppress(ValueError):  # not in the main thread: nothing was set
            signal.signal(signal.SIGINT, handler)
