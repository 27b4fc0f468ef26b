"""Drafter training over Ray, with real trainers and target actors on a tiny target."""

import os
import signal
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from dspark_ray.errors import PlacementError, TrainingError
from dspark_ray.training.config import TrainingConfig
from dspark_ray.training.corpus import make_corpus
from dspark_ray.training.draft_setup import prepare_setup
from dspark_ray.training.draft_trainer import STATE_FILE, DraftTrainer
from dspark_ray.training.local_training import train_locally
from dspark_ray.training.ray_targets import ray_target_pool
from dspark_ray.training.ray_training import STORAGE, train_on_ray
from dspark_ray.training.sequences import TrainingSequence
from dspark_ray.training.training_loop import TrainingRecord
from dspark_ray.workers.names import NAMESPACE
from tests.chat_models import save_chat_model

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

Report = Callable[[TrainingRecord], None]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_chat_model(folder)
    return folder


def config_for(target: Path, **sections: dict[str, object]) -> TrainingConfig:
    optimisation = {"num_steps": 16, "tokens_per_step": 256, "checkpoint_every_steps": 4, "log_every_steps": 4}
    return TrainingConfig.model_validate(
        {
            "teacher": {"model": str(target), "dtype": "float32", "device": "cpu", **sections.get("teacher", {})},
            "draft": {"block_size": 3, "markov_rank": 8, "num_layers": 1},
            "optimisation": {
                "dtype": "float32",
                "warmup_steps": 2,
                "learning_rate": 0.003,
                **optimisation,
                **sections.get("optimisation", {}),
            },
            "trainer": {"num_cpus": 0.1, **sections.get("trainer", {})},
        }
    )


def repeating_sequences(count: int, seed: int) -> list[TrainingSequence]:
    """Replies that repeat three letters: something a drafter learns in a few steps."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(24, 48, count)
    periods = rng.integers(97, 122, (count, 3))
    return [
        TrainingSequence(tuple(int(token) for token in np.resize(period, length)), reply_start=4, temperature=1.0)
        for period, length in zip(periods, lengths, strict=True)
    ]


def train(config: TrainingConfig, folder: Path, record: Report, how: Callable[..., DraftTrainer]) -> DraftTrainer:
    sequences, validation = repeating_sequences(80, 0), repeating_sequences(8, 1)
    return how(config, prepare_setup(config, sequences, folder), sequences, validation, folder, record)


def weights(trainer: DraftTrainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().cpu() for name, parameter in trainer.model.named_parameters()}


def test_two_trainers_and_two_target_actors_learn(target: Path, tmp_path: Path) -> None:
    records: list[TrainingRecord] = []
    config = config_for(target, trainer={"num_workers": 2}, teacher={"num_feature_workers": 2})
    trainer = train(config, tmp_path, records.append, train_on_ray)
    losses = [record.loss for record in records if record.split == "validation"]
    assert [record.step for record in records if record.split == "validation"] == [4, 8, 12, 16]
    assert losses[-1] < losses[0]
    assert trainer.step == 16
    assert (tmp_path / STATE_FILE).is_file()
    assert not (tmp_path / STORAGE).exists()
    assert feature_workers() == []


def test_one_trainer_over_ray_gives_the_weights_of_training_in_one_process(target: Path, tmp_path: Path) -> None:
    config = config_for(target)
    local = weights(train(config, tmp_path / "local", ignore, train_locally))
    over_ray = weights(train(config, tmp_path / "ray", ignore, train_on_ray))
    assert local.keys() == over_ray.keys()
    for name, weight in local.items():
        assert torch.equal(weight, over_ray[name]), name


def test_a_run_begun_in_one_process_goes_on_over_ray(target: Path, tmp_path: Path) -> None:
    whole = weights(train(config_for(target), tmp_path / "whole", ignore, train_locally))

    def stop_at_eight(record: TrainingRecord) -> None:
        if record.step == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config_for(target), tmp_path / "parts", stop_at_eight, train_locally)
    steps: list[int] = []
    parts = weights(train(config_for(target), tmp_path / "parts", lambda each: steps.append(each.step), train_on_ray))
    assert min(steps) == 12, "the state of step 8 was not taken up"
    for name, weight in whole.items():
        assert torch.equal(weight, parts[name]), name


def test_a_killed_target_actor_does_not_stop_training(target: Path, tmp_path: Path) -> None:
    records: list[TrainingRecord] = []
    killed: list[int] = []

    def record(each: TrainingRecord) -> None:
        records.append(each)
        if not killed:
            killed.append(ray.get(feature_workers()[0].pid.remote()))
            os.kill(killed[0], signal.SIGKILL)

    config = config_for(target, optimisation={"num_steps": 200, "log_every_steps": 10, "checkpoint_every_steps": 200})
    trainer = train(config, tmp_path, record, train_on_ray)
    assert trainer.step == 200
    assert killed
    steps = [each.step for each in records if each.split == "train"]
    assert steps == list(range(10, 201, 10)), "training went on from where it was"


def test_a_killed_trainer_goes_on_from_the_last_checkpoint(
    target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps: list[int] = []

    def record(each: TrainingRecord) -> None:
        if each.split == "train":
            steps.append(each.step)
        if steps == [10, 20, 30]:
            os.kill(trainer_processes()[0], signal.SIGKILL)

    config = config_for(target, optimisation={"num_steps": 400, "log_every_steps": 10, "checkpoint_every_steps": 20})
    trainer = train(config, tmp_path, record, train_on_ray)
    assert trainer.step == 400
    again = next(index for index, (before, after) in enumerate(pairwise(steps)) if after <= before)
    checkpoint = steps[again + 1] - 10
    assert checkpoint % 20 == 0
    assert 20 <= checkpoint <= steps[again] < checkpoint + 40, "more than the last checkpoint was lost"
    assert "training was interrupted" in caplog.text


def test_a_trainer_that_always_fails_ends_the_run_with_the_cause(target: Path, tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_bytes(b"not a state")
    with pytest.raises(TrainingError, match=r"more than 1 time.*trainer.max_failures.*cannot be read as a trainer's"):
        train(config_for(target, trainer={"max_failures": 1}), tmp_path, ignore, train_on_ray)
    assert feature_workers() == []


def test_too_many_trainers_for_the_cluster_are_refused_by_name(target: Path, tmp_path: Path) -> None:
    config = config_for(target, trainer={"num_workers": 3, "num_cpus": 7.0, "placement_timeout_seconds": 1.0})
    with pytest.raises(PlacementError, match=r"3 trainer\(s\).*Nodes have \[.*CPU 8.*trainer.num_workers"):
        train(config, tmp_path, ignore, train_on_ray)


def test_the_corpus_is_written_by_target_engines_over_ray(target: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"turns": ["number {index}"]}}\n' for index in range(12)))
    config = TrainingConfig.model_validate(
        {
            "teacher": {"model": str(target), "dtype": "float32", "device": "cpu", "num_cpus": 0.1},
            "corpus": {
                "prompts": [str(prompts)],
                "synthesise": False,
                "num_reply_tokens": 10_000,
                "max_reply_tokens": 16,
                "validation_share": 0.0,
            },
        }
    )
    counts = make_corpus(config.teacher, config.corpus, tmp_path / "corpus", ignore, ray_target_pool(2))
    assert counts.sequences["train"] + counts.skipped.total() == 12
    assert counts.sequences["train"] > 0


def ignore(record: object) -> None:
    """No report."""


def feature_workers() -> list[ray.actor.ActorHandle]:
    """The target actors of the run that is going on; killed ones lose their names a little later."""
    deadline = time.monotonic() + 10
    while True:
        names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
        found = [name for name in names if "FeatureWorker" in name]
        if found == [] or threading.current_thread() is not threading.main_thread() or time.monotonic() > deadline:
            return [ray.get_actor(name, namespace=NAMESPACE) for name in found]
        time.sleep(0.1)


def trainer_processes() -> list[int]:
    """Processes of trainers below this one's Ray (others may run on the machine)."""
    raylets = {pid for pid, parent, _ in processes() if parent == os.getpid()}
    return [pid for pid, parent, name in processes() if parent in raylets and "RayTrainWorker" in name]


def processes() -> list[tuple[int, int, str]]:
    """Number, parent's number and command line of every process."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                found.append((int(folder.name), parent, (folder / "cmdline").read_text()))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found
