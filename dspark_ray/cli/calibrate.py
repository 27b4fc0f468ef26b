"""`dspark-ray calibrate`: drafts of real decoding to calibration.json, a table, a picture, then one JSON line."""

import asyncio
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from dspark_ray.algorithm.mode_calibration import MODES, CalibrationMode
from dspark_ray.cli.arguments import config_from
from dspark_ray.cli.progress import advancing, progress_bar
from dspark_ray.config import AppConfig
from dspark_ray.engine.drafters.factory import CALIBRATION_FILE
from dspark_ray.errors import ConfigError
from dspark_ray.exactness import read_prompts
from dspark_ray.models.draft_config import checkpoint_kind
from dspark_ray.models.resolve import resolve_drafter, resolve_model
from dspark_ray.offline import load_tokenizer
from dspark_ray.training.calibrate import CalibrationSettings, ModeReport
from dspark_ray.training.measurement import Prompts
from dspark_ray.training.pipeline import calibrate_drafter, validation_prompts
from dspark_ray.training.run_folder import RunFolder

MEAN_ECE_GOAL = 0.015


def run(args: Namespace) -> int:
    disable_progress_bar()  # transformers' own, of loading weights
    config = config_from(args, **{"target.row_invariant": False})
    folder = Path(str(resolve_drafter(config.drafter, config.target.model)))
    kind = checkpoint_kind(folder)
    if kind == "draft_model":
        raise ConfigError(f"--drafter-model {folder} is a language model: it has no confidences to calibrate")
    drafter = config.drafter.model_copy(update={"kind": kind, "model": str(folder)})
    config = config.model_copy(update={"drafter": drafter})
    prompts, data = _prompts(args, config, folder)
    settings = CalibrationSettings(args.temperature, args.max_tokens, args.concurrency)
    out = args.out or folder / CALIBRATION_FILE
    with progress_bar() as progress:
        on_done = advancing(progress, progress.add_task("decoding", total=len(MODES) * len(prompts)))
        reports = asyncio.run(calibrate_drafter(config, folder, prompts, settings, data, on_done, out))
    print_calibration(reports)
    print(f"wrote {out} and {out.with_suffix('.png')}")
    print(json.dumps({"benchmark": "calibrate", **calibration_summary(reports)}))
    return 0


def _prompts(args: Namespace, config: AppConfig, folder: Path) -> tuple[Prompts, str]:
    """From --prompts, else the prompts of the training run that were never trained on."""
    if args.prompts:
        tokenizer = load_tokenizer(resolve_model(config.target.model))
        prompts = read_prompts(args.prompts, args.limit, tokenizer)
        return [prompt.token_ids for prompt in prompts], ", ".join(path.name for path in args.prompts)
    corpus = args.corpus or RunFolder(folder).corpus
    if not corpus.is_dir():
        raise ConfigError(f"{corpus} does not exist: give --prompts FILE.jsonl or --corpus FOLDER of a training run")
    return validation_prompts(corpus, args.limit), "validation prompts"


def print_calibration(reports: dict[CalibrationMode, ModeReport]) -> None:
    """A table a mode: error of the survival at each position on the held-out half."""
    for mode, each in reports.items():
        rows = Table("position", "temperature", "shift", "ECE raw", "ECE unshifted", "ECE", "AUC")
        rows.title = f"{mode}, {each.num_held_out} held-out drafts"
        table, errors = each.table, (each.ece_before, each.ece_unshifted, each.ece_after)
        for k, auc in enumerate(each.auc):
            rows.add_row(
                str(k + 1),
                f"{table.temperatures[k]:.2f}",
                f"{table.shifts[k]:+.2f}",
                *(f"{error[k]:.1%}" for error in errors),
                "-" if auc is None else f"{auc:.3f}",
            )
        rows.add_row("mean", "", "", *(f"{np.mean(error):.1%}" for error in errors), "")
        Console().print(rows)


def calibration_summary(reports: dict[CalibrationMode, ModeReport]) -> dict[str, Any]:
    modes, goals = {}, {}
    for mode, each in reports.items():
        before, after = each.mean_ece
        modes[mode] = {
            "held_out_drafts": each.num_held_out,
            "temperatures": [round(value, 4) for value in each.table.temperatures],
            "shifts": [round(value, 4) for value in each.table.shifts],
            "ece_before": [round(value, 5) for value in each.ece_before],
            "ece_unshifted": [round(value, 5) for value in each.ece_unshifted],
            "ece_after": [round(value, 5) for value in each.ece_after],
            "mean_ece_before": round(before, 5),
        }
        goals[f"mean_ece_{mode}"] = {"value": round(after, 5), "goal": MEAN_ECE_GOAL, "met": after <= MEAN_ECE_GOAL}
    return {"modes": modes, "goals": goals}
