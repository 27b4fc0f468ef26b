"""The loop of one trainer over batches as they come: records for the log, validation, checkpoints.

Shared by training in this process and by every worker of Ray Train; knows neither.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from dspark_ray.training.batches import SupervisedBatch
from dspark_ray.training.draft_trainer import DraftTrainer, StepMetrics, learning_rate

VALIDATION_BATCHES = 8


@dataclass(frozen=True, slots=True)
class TrainingRecord:
    """Means over the steps since the record before. Acceptance is teacher-forced; rates are of one trainer."""

    split: Literal["train", "validation"]
    step: int
    num_steps: int
    loss: float
    cross_entropy: float
    total_variation: float
    confidence: float
    acceptance: tuple[float, ...]  # K, mean of c* at each draft position
    accepted_length: float  # expected tokens a round, bonus included
    learning_rate: float
    positions_per_second: float  # supervised draft positions, 0 for validation
    tokens_per_second: float  # sequence tokens
    waiting_share: float  # of the time, for features
    seconds: float  # since the loop began

    def to_json(self) -> str:
        return json.dumps({name: _rounded(value) for name, value in asdict(self).items()})

    @classmethod
    def from_json(cls, line: str) -> "TrainingRecord":
        data = json.loads(line)
        return cls(**{**data, "acceptance": tuple(data["acceptance"])})


@dataclass(frozen=True, slots=True)
class LoopHooks:
    """What the loop hands out: a record for the log, and the moments when a checkpoint is due."""

    record: Callable[[TrainingRecord], None]
    checkpoint: Callable[[DraftTrainer], None]


def run_training(
    trainer: DraftTrainer, batches: Iterator[SupervisedBatch], validation: Sequence[SupervisedBatch], hooks: LoopHooks
) -> None:
    """Step the trainer from where it stands to `num_steps`; validate and checkpoint on the way and at the end."""
    config, began = trainer.config, time.perf_counter()
    pending: list[StepMetrics] = []
    mark, waited = began, 0.0
    while trainer.step < config.num_steps:
        asked = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - asked
        pending.append(trainer.train_step(batch))
        if trainer.step % config.log_every_steps == 0 or trainer.step == config.num_steps:
            now = time.perf_counter()
            hooks.record(_record(trainer, "train", pending, now - mark, waited, now - began))
            pending, mark, waited = [], now, 0.0
        if trainer.step % config.checkpoint_every_steps == 0 or trainer.step == config.num_steps:
            if validation:
                figures = [trainer.validate(held) for held in validation]
                hooks.record(_record(trainer, "validation", figures, 0.0, 0.0, time.perf_counter() - began))
            hooks.checkpoint(trainer)
            mark, waited = time.perf_counter(), 0.0
            # A record across a checkpoint would count its time as training.
            pending = []


def _record(
    trainer: DraftTrainer,
    split: Literal["train", "validation"],
    steps: Sequence[StepMetrics],
    span: float,
    waited: float,
    seconds: float,
) -> TrainingRecord:
    weights = np.array([step.num_positions for step in steps], dtype=np.float64)

    def mean(values: Sequence[float] | Sequence[np.ndarray]) -> np.ndarray:
        return np.average(np.array(values), axis=0, weights=weights if weights.any() else None)

    return TrainingRecord(
        split=split,
        step=trainer.step,
        num_steps=trainer.config.num_steps,
        loss=float(mean([step.loss for step in steps])),
        cross_entropy=float(mean([step.cross_entropy for step in steps])),
        total_variation=float(mean([step.total_variation for step in steps])),
        confidence=float(mean([step.confidence for step in steps])),
        acceptance=tuple(mean([step.acceptance for step in steps]).tolist()),
        accepted_length=float(mean([step.accepted_length for step in steps])),
        learning_rate=learning_rate(trainer.config, trainer.step),
        positions_per_second=float(weights.sum()) / span if span else 0.0,
        tokens_per_second=sum(step.num_tokens for step in steps) / span if span else 0.0,
        waiting_share=waited / span if span else 0.0,
        seconds=seconds,
    )


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    return [_rounded(each) for each in value] if isinstance(value, tuple) else value
