"""`dspark-ray evaluate`: drafters side by side on prompt files: a table, pictures, then one JSON line."""

import asyncio
import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from dspark_ray.cli.arguments import config_from
from dspark_ray.cli.progress import advancing, progress_bar
from dspark_ray.config import DEMO_DRAFTER, AppConfig
from dspark_ray.errors import ConfigError
from dspark_ray.exactness import read_prompts
from dspark_ray.models.draft_config import checkpoint_kind
from dspark_ray.models.resolve import resolve_drafter, resolve_model
from dspark_ray.offline import load_tokenizer
from dspark_ray.training.evaluate import DataSets, DrafterReport, EvaluationSettings, evaluate, goals
from dspark_ray.training.pictures import draw_acceptance, draw_threshold_sweep
from dspark_ray.training.scores import threshold_sweep

THRESHOLDS = np.array([0.0, 0.2, 0.4, 0.6, 0.8])
WITHOUT_CHECKPOINT = ("none", "ngram")


def run(args: Namespace) -> int:
    disable_progress_bar()  # transformers' own, of loading weights
    config = config_from(args, **{"target.row_invariant": False})
    drafters = named_drafters(args.drafters, config)
    tokenizer = load_tokenizer(resolve_model(config.target.model))
    data_sets = {path.stem: [p.token_ids for p in read_prompts([path], args.limit, tokenizer)] for path in args.prompts}
    settings = EvaluationSettings(tuple(args.temperatures), args.max_tokens, args.concurrency)
    reports = asyncio.run(_evaluate_all(drafters, data_sets, settings))
    if args.out is not None:
        draw(reports, args.out)
    print_tables(reports)
    print(json.dumps(summary(reports, config, settings)))
    return 0


def named_drafters(given: Sequence[str], config: AppConfig) -> dict[str, AppConfig]:
    """NAME=FOLDER, a folder (named after itself), or a kind without a checkpoint; by default the demo's drafter."""
    out = {}
    for text in given or [f"dspark={DEMO_DRAFTER}"]:
        name, equals, folder = text.partition("=")
        if not equals:
            name, folder = Path(text).name, text
        if folder in WITHOUT_CHECKPOINT:
            drafter = config.drafter.model_copy(update={"kind": folder, "model": None})
        else:
            checkpoint = resolve_drafter(config.drafter.model_copy(update={"model": folder}), config.target.model)
            kind = checkpoint_kind(Path(str(checkpoint)))
            drafter = config.drafter.model_copy(update={"kind": kind, "model": str(checkpoint)})
        if name in out:
            raise ConfigError(f"--drafters: {name!r} is given twice; name them, as NAME=FOLDER")
        out[name] = config.model_copy(update={"drafter": drafter})
    return out


async def _evaluate_all(
    drafters: Mapping[str, AppConfig], data_sets: DataSets, settings: EvaluationSettings
) -> list[DrafterReport]:
    total = len(settings.temperatures) * sum(len(prompts) for prompts in data_sets.values())
    reports = []
    with progress_bar() as progress:
        for name, config in drafters.items():
            on_done = advancing(progress, progress.add_task(name, total=total))
            reports.append(await evaluate(name, config, data_sets, settings, on_done))
    return reports


def draw(reports: Sequence[DrafterReport], folder: Path) -> None:
    """Pictures of acceptance and of thresholds, one of each a temperature."""
    folder.mkdir(parents=True, exist_ok=True)
    drafting = [report for report in reports if report.drafts]
    for temperature in drafting[0].measurements if drafting else ():
        stem = f"T{temperature:g}"
        data_sets = drafting[0].measurements[temperature]
        curves = {
            data_set: {report.name: report.data_set_acceptance(temperature, data_set) for report in drafting}
            for data_set in data_sets
        }
        draw_acceptance(curves, folder / f"acceptance_{stem}.png")
        sweeps = {name: threshold_sweep(measured.outcomes, THRESHOLDS) for name, measured in data_sets.items()}
        draw_threshold_sweep(sweeps, folder / f"threshold_{stem}.png")


def print_tables(reports: Sequence[DrafterReport]) -> None:
    """Accepted length by data set; then acceptance by position."""
    console = Console()
    for temperature in reports[0].measurements:
        lengths = Table("drafter", *reports[0].measurements[temperature], "mean", "tokens/s", "AUC")
        lengths.title = f"accepted length (bonus included), temperature {temperature:g}"
        positions = Table("drafter", "conditional acceptance by position (all data sets)")
        for report in reports:
            measured = report.measurements[temperature].values()
            auc = report.auc(temperature)
            lengths.add_row(
                report.name,
                *(f"{each.accepted_length:.2f}" for each in measured),
                f"{report.mean_accepted_length(temperature):.3f}",
                f"{report.tokens_per_second(temperature):.1f}",
                "-" if auc is None else f"{auc:.3f}",
            )
            if report.drafts:
                conditional = report.acceptance(temperature).conditional
                positions.add_row(report.name, " ".join(f"{value:.2f}" for value in conditional))
        console.print(lengths, positions)


def summary(reports: Sequence[DrafterReport], config: AppConfig, settings: EvaluationSettings) -> dict[str, object]:
    return {
        "benchmark": "evaluate",
        "model": config.target.model,
        "max_tokens": settings.max_tokens,
        "concurrency": settings.concurrency,
        "drafters": {report.name: report.as_dict() for report in reports},
        "goals": goals(reports),
    }
