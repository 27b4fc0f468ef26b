"""`dspark-ray train`: corpus, training, calibration and evaluation in one command, over Ray or in this process."""

import json
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import ray
import yaml
from transformers.utils.logging import disable_progress_bar

from dspark_ray.cli.arguments import training_config_from
from dspark_ray.cli.calibrate import calibration_summary, print_calibration
from dspark_ray.cli.evaluate import print_tables
from dspark_ray.cli.progress import advancing, progress_bar
from dspark_ray.exactness import read_prompts
from dspark_ray.models.resolve import resolve_model
from dspark_ray.offline import load_tokenizer
from dspark_ray.training.config import Stage, TrainingConfig
from dspark_ray.training.corpus import CorpusCounts
from dspark_ray.training.evaluate import DataSets, goals
from dspark_ray.training.pipeline import calibrate_stage, corpus_stage, evaluate_stage, train_stage
from dspark_ray.training.run_folder import RunFolder
from dspark_ray.training.training_loop import TrainingRecord


def run(args: Namespace) -> int:
    disable_progress_bar()  # transformers' own, of loading weights
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is finished is kept, as after Ctrl-C
    config = training_config_from(args)
    folder = RunFolder(args.out, args.corpus)
    folder.keep_config(yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True)))
    stages: dict[Stage, Callable[[], dict[str, Any]]] = {
        "corpus": lambda: _corpus(config, folder, args),
        "train": lambda: _train(config, folder, args),
        "calibrate": lambda: _calibrate(config, folder),
        "evaluate": lambda: _evaluate(config, folder),
    }
    summary: dict[str, Any] = {"command": "train", "out": str(args.out), "goals": {}}
    with nullcontext() if args.local else _ray(args.address):
        for stage in (stage for stage in stages if stage in args.stages):
            _say(f"stage {stage}")
            result = stages[stage]()
            summary["goals"].update(result.pop("goals", {}))
            summary[stage] = result
    print(json.dumps(summary))
    return 0


@contextmanager
def _ray(address: str | None) -> Iterator[None]:
    """A Ray of this command's own, or the cluster given."""
    ray.init(address=address or "local", include_dashboard=None if address else False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def _corpus(config: TrainingConfig, folder: RunFolder, args: Namespace) -> dict[str, Any]:
    if folder.other_corpus is not None:
        _say(f"using the corpus in {folder.other_corpus} as it is")
        return {}
    wanted = config.corpus.num_reply_tokens

    def report(counts: CorpusCounts) -> None:
        done, seconds = counts.reply_tokens.total(), max(counts.seconds, 1e-9)
        skipped = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.skipped.items())) or "none"
        _say(f"{done:,} of {wanted:,} reply tokens, {done / seconds:.0f} a second; skipped: {skipped}")

    counts = corpus_stage(config, folder, report, local=args.local)
    return {
        "sequences": dict(counts.sequences),
        "reply_tokens": dict(counts.reply_tokens),
        "skipped": dict(counts.skipped),
        "seconds": round(counts.seconds, 1),
    }


def _train(config: TrainingConfig, folder: RunFolder, args: Namespace) -> dict[str, Any]:
    started, last = time.monotonic(), {}

    def record(each: TrainingRecord) -> None:
        last[each.split] = each
        _say(training_line(each))

    train_stage(config, folder, record, local=args.local)
    validation = last.get("validation")
    _say(f"wrote the drafter {folder.drafter}")
    return {
        "steps": config.optimisation.num_steps,
        "seconds": round(time.monotonic() - started, 1),
        "validation": json.loads(validation.to_json()) if validation else None,
    }


def training_line(record: TrainingRecord) -> str:
    """One line of progress; acceptance and length are teacher-forced estimates."""
    acceptance = " ".join(f"{value:.2f}" for value in record.acceptance)
    line = (
        f"{record.split} {record.step}/{record.num_steps}  loss {record.loss:.3f}  acceptance {acceptance}  "
        f"length {record.accepted_length:.2f}"
    )
    if record.split == "validation":
        return line
    return (
        f"{line}  {record.tokens_per_second:,.0f} tokens/s  {record.positions_per_second:,.0f} positions/s  "
        f"waiting {record.waiting_share:.0%}"
    )


def _calibrate(config: TrainingConfig, folder: RunFolder) -> dict[str, Any]:
    with progress_bar() as progress:
        reports = calibrate_stage(config, folder, advancing(progress, progress.add_task("decoding", total=None)))
    print_calibration(reports)
    return calibration_summary(reports)


def _evaluate(config: TrainingConfig, folder: RunFolder) -> dict[str, Any]:
    if not config.corpus.held_out:
        _say("no held-out prompts: give --held-out FILES to evaluate on them")
        return {}
    tokenizer = load_tokenizer(resolve_model(config.teacher.model))
    files = [Path(name) for name in config.corpus.held_out]
    data_sets: DataSets = {
        file.stem: [prompt.token_ids for prompt in read_prompts([file], None, tokenizer)] for file in files
    }
    with progress_bar() as progress:
        task = progress.add_task("decoding", total=2 * sum(map(len, data_sets.values())))
        report = evaluate_stage(config, folder, data_sets, advancing(progress, task))
    print_tables([report])
    return {**report.as_dict(), "goals": goals([report])}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
