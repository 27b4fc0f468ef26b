"""The stages of `dspark-ray train`, each on the same run folder and each going on from where it was stopped.

Corpus and training run over Ray or in this process; calibration and evaluation decode in this process.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from dspark_ray.algorithm.mode_calibration import CalibrationMode
from dspark_ray.config import AppConfig
from dspark_ray.engine.drafters.factory import CALIBRATION_FILE
from dspark_ray.models.checkpoints import save_draft_model
from dspark_ray.models.draft_config import checkpoint_kind
from dspark_ray.models.files import replace_text
from dspark_ray.offline import Completion
from dspark_ray.training.calibrate import CalibrationSettings, ModeReport, calibrate
from dspark_ray.training.config import TrainingConfig
from dspark_ray.training.corpus import CorpusCounts, Report, TargetPool, make_corpus
from dspark_ray.training.draft_setup import prepare_setup
from dspark_ray.training.evaluate import DataSets, DrafterReport, EvaluationSettings, evaluate
from dspark_ray.training.local_training import train_locally
from dspark_ray.training.measurement import Prompts, open_meter
from dspark_ray.training.pictures import draw_reliability, draw_training
from dspark_ray.training.ray_targets import ray_target_pool
from dspark_ray.training.ray_training import train_on_ray
from dspark_ray.training.run_folder import RunFolder
from dspark_ray.training.sequences import TrainingSequence, read_sequences, read_shards
from dspark_ray.training.training_loop import TrainingRecord

VALIDATION_PROMPTS = 256
CALIBRATION = CalibrationSettings(temperature=1.0, max_tokens=128, concurrency=16)
EVALUATION = EvaluationSettings(temperatures=(0.0, 1.0), max_tokens=128, concurrency=16)


def corpus_stage(config: TrainingConfig, run: RunFolder, report: Report, *, local: bool) -> CorpusCounts:
    """Let the target write and answer prompts until there are enough reply tokens."""
    pool = TargetPool() if local else ray_target_pool(config.teacher.num_feature_workers)
    return make_corpus(config.teacher, config.corpus, run.corpus, report, pool)


def train_stage(
    config: TrainingConfig, run: RunFolder, record: Callable[[TrainingRecord], None], *, local: bool
) -> None:
    """Train from the run's last checkpoint, or from the start; the finished drafter lies in `run.drafter`.

    Raises ConfigError where there is no corpus, CheckpointError where the run is of another drafter.
    """
    sequences = read_sequences(run.corpus, "train")
    validation = list(read_shards(run.corpus, "validation"))
    setup = prepare_setup(config, sequences, run.state)

    def keep(each: TrainingRecord) -> None:
        run.append_metrics(each)
        record(each)

    trainer = (train_locally if local else train_on_ray)(config, setup, sequences, validation, run.state, keep)
    save_draft_model(trainer.model, setup.config_json, run.drafter)
    draw_training(run.read_metrics(), run.pictures / "training.png")


def calibrate_stage(
    config: TrainingConfig, run: RunFolder, on_done: Callable[[Completion], None]
) -> dict[CalibrationMode, ModeReport]:
    """Fit calibration.json on the prompts of the corpus that were never trained on."""
    prompts = validation_prompts(run.corpus, VALIDATION_PROMPTS)
    app = serving_config(config, run.drafter)
    return asyncio.run(calibrate_drafter(app, run.drafter, prompts, CALIBRATION, "validation prompts", on_done))


async def calibrate_drafter(
    app: AppConfig,
    folder: Path,
    prompts: Prompts,
    settings: CalibrationSettings,
    data: str,
    on_done: Callable[[Completion], None],
    out: Path | None = None,
) -> dict[CalibrationMode, ModeReport]:
    """Fit by decoding `prompts` and write calibration.json with its picture. Args: data: what the prompts are."""
    provenance = {"data": data, "target": app.target.model, "drafter": folder.name}
    async with open_meter(app, raw_confidences=True) as meter:
        calibration, reports = await calibrate(meter, prompts, settings, provenance, on_done)
    path = out or folder / CALIBRATION_FILE
    replace_text(path, calibration.to_json() + "\n")
    draw_reliability(reports, path.with_suffix(".png"))
    return reports


def evaluate_stage(
    config: TrainingConfig, run: RunFolder, data_sets: DataSets, on_done: Callable[[Completion], None]
) -> DrafterReport:
    """Real decoding of the held-out files' prompts."""
    name = checkpoint_kind(run.drafter)
    return asyncio.run(evaluate(name, serving_config(config, run.drafter), data_sets, EVALUATION, on_done))


def serving_config(config: TrainingConfig, drafter: Path) -> AppConfig:
    """An engine of the run's target with the run's drafter, in this process."""
    return AppConfig.model_validate(
        {
            "target.model": config.teacher.model,
            "target.dtype": config.teacher.dtype,
            "target.device": config.teacher.device,
            "target.num_threads": config.corpus.num_threads,
            "target.row_invariant": False,
            "drafter.kind": checkpoint_kind(drafter),
            "drafter.model": str(drafter),
        }
    )


def validation_prompts(corpus: Path, limit: int) -> list[tuple[int, ...]]:
    """The first `limit` prompts of a corpus that were never trained on."""
    sequences: Sequence[TrainingSequence] = read_sequences(corpus, "validation")
    return list(dict.fromkeys(sequence.token_ids[: sequence.reply_start] for sequence in sequences))[:limit]
