"""Drafter training in this process: one machine, or a GPU box without Ray. The same steps as under Ray Train."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from dspark_ray.models.target import resolve_device
from dspark_ray.training.batches import SupervisedBatch, endless_batches, epoch_batches
from dspark_ray.training.config import TrainingConfig
from dspark_ray.training.draft_setup import DraftSetup
from dspark_ray.training.draft_trainer import STATE_FILE, DraftTrainer
from dspark_ray.training.feature_stream import FeatureCache, FeatureSource, LocalFeatureSource, stream_features
from dspark_ray.training.features import FeatureExtractor
from dspark_ray.training.markov_start import start_markov_head
from dspark_ray.training.sequences import TrainingSequence
from dspark_ray.training.training_loop import VALIDATION_BATCHES, LoopHooks, TrainingRecord, run_training


def train_locally(
    config: TrainingConfig,
    setup: DraftSetup,
    sequences: Sequence[TrainingSequence],
    validation: Sequence[TrainingSequence],
    folder: Path,
    record: Callable[[TrainingRecord], None],
) -> DraftTrainer:
    """Train from the state in `folder`, or from the start; the state after the last step lies there at the end."""
    torch.set_num_threads(config.trainer.num_threads)
    trainer = new_trainer(config, setup, sequences, folder, resolve_device(config.teacher.device))
    source = LocalFeatureSource(FeatureExtractor(config.teacher, setup.target_layer_ids))
    optimisation = config.optimisation
    order = endless_batches(sequences, optimisation.tokens_per_step, optimisation.seed, 0, 1, skip=trainer.step)
    batches = stream_features(sequences, order, source, config.trainer.prefetch_batches, feature_cache(config, folder))
    run_training(
        trainer,
        batches,
        validation_batches(config, validation, source),
        LoopHooks(record, lambda stepped: stepped.save(folder)),
    )
    return trainer


def new_trainer(
    config: TrainingConfig,
    setup: DraftSetup,
    sequences: Sequence[TrainingSequence],
    folder: Path,
    device: torch.device,
    worker: int = 0,
) -> DraftTrainer:
    """As the state in `folder` has it, or before the first step: every worker of a run gets the same weights."""
    model, kept = setup.build(), (folder / STATE_FILE).is_file()
    if not kept and setup.initial_drafter is None:
        start_markov_head(model, sequences, setup.seed)
    trainer = DraftTrainer(model, config.optimisation, device, worker)
    if kept:
        trainer.load(folder)
    return trainer


def validation_batches(
    config: TrainingConfig, validation: Sequence[TrainingSequence], source: FeatureSource
) -> list[SupervisedBatch]:
    """A few batches, the same at every validation of a run."""
    if not validation:
        return []
    order = epoch_batches(validation, config.optimisation.tokens_per_step, 0, 0, 0, 1)[:VALIDATION_BATCHES]
    return list(stream_features(validation, iter(order), source, 1, FeatureCache("none")))


def feature_cache(config: TrainingConfig, folder: Path) -> FeatureCache:
    kind = config.trainer.feature_cache
    return FeatureCache(kind, folder / "features" if kind == "disk" else None)
