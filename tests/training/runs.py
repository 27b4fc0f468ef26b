"""Runs of training on tiny targets: configuration, sequences, and what a served drafter says."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from dspark_ray.config import AppConfig
from dspark_ray.offline import Completion, complete_all, open_engine
from dspark_ray.request import GenerationRequest, SamplingParams
from dspark_ray.training.config import TrainingConfig
from dspark_ray.training.pipeline import serving_config, train_stage
from dspark_ray.training.run_folder import RunFolder
from dspark_ray.training.sequences import Split, TrainingSequence, shard_path, write_shard
from dspark_ray.training.training_loop import TrainingRecord

BYTES = 256  # ids below it are plain bytes to the tokenizer of tests/chat_models.py
PROMPTS = [(5, 6, 7, 8), (60, 61, 62), (100, 101, 102, 103, 104, 105)]


def tiny_config(target: Path, **keys: Any) -> TrainingConfig:
    """A drafter of one layer over blocks of 4, in float32, a dozen steps; `keys` are dotted."""
    small = {
        "teacher.model": str(target),
        "teacher.dtype": "float32",
        "teacher.device": "cpu",
        "corpus.num_threads": 1,
        "draft.num_layers": 1,
        "draft.block_size": 4,
        "draft.markov_rank": 4,
        "optimisation.num_steps": 12,
        "optimisation.tokens_per_step": 160,
        "optimisation.anchors_per_sequence": 8,
        "optimisation.learning_rate": 3e-3,
        "optimisation.warmup_steps": 2,
        "optimisation.dtype": "float32",
        "optimisation.checkpoint_every_steps": 4,
        "optimisation.log_every_steps": 3,
        "trainer.num_threads": 1,
    }
    given = {key.replace("__", "."): value for key, value in keys.items()}
    if given.get("draft.architecture") == "autoregressive":
        del small["draft.num_layers"]
    return TrainingConfig.model_validate({**small, **given})


def random_sequences(count: int, seed: int = 0, num_tokens: int = BYTES) -> list[TrainingSequence]:
    """Sequences of 12 to 40 tokens, replies from a third on."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(12, 41, count)
    return [
        TrainingSequence(tuple(map(int, rng.integers(0, num_tokens, length))), int(length) // 3, 1.0)
        for length in lengths
    ]


def run_with_corpus(folder: Path, num_tokens: int = BYTES) -> RunFolder:
    """A run folder whose corpus is written: about three steps an epoch."""
    run = RunFolder(folder)
    run.corpus.mkdir(parents=True)
    for seed, (split, count) in enumerate(zip(get_args(Split), (16, 6), strict=True)):
        write_shard(shard_path(run.corpus, split, 0), random_sequences(count, seed, num_tokens))
    return run


def train(config: TrainingConfig, run: RunFolder) -> list[TrainingRecord]:
    """The train stage in this process; every record."""
    records: list[TrainingRecord] = []
    train_stage(config, run, records.append, local=True)
    return records


def greedy(config: TrainingConfig, drafter: Path | None, max_tokens: int = 24) -> list[Completion]:
    """Greedy replies of the run's target, served with the drafter (None: plainly) in this process."""
    served: dict[str, Any] = {"engine": {"num_pages": 64, "max_num_seqs": 4}, "verification": {"policy": "none"}}
    if drafter is None:
        served["target"] = {"model": config.teacher.model, "dtype": "float32", "device": "cpu", "num_threads": 1}
        served["drafter"] = {"kind": "none"}
    else:
        served = {**serving_config(config, drafter).model_dump(), **served, "verification": {"policy": "static"}}
    return asyncio.run(_complete(AppConfig.model_validate(served), PROMPTS, max_tokens))


async def _complete(config: AppConfig, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> list[Completion]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    requests = [GenerationRequest(f"r{index}", prompt, params) for index, prompt in enumerate(prompts)]
    async with open_engine(config) as engine:
        return await complete_all(engine, requests, len(requests))
