"""Drafters trained by the same command on the same corpus with the same budget, then judged by real decoding.

    python benchmarks/rivals.py --corpus DIR --prompts FILES --out DIR [--variants dspark dflash ...] [--quick]

Every variant is `dspark-ray train --stages train` in a process of its own, one after the other; a variant that an
earlier call has trained is not trained again. DFlash's block is one longer, so that it predicts as many tokens. Ends in
one JSON line.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from dspark_ray.training.run_folder import RunFolder
from dspark_ray.training.training_loop import TrainingRecord

VARIANTS: dict[str, dict[str, object]] = {
    "dspark": {},
    "dflash": {"draft.architecture": "dflash", "draft.block_size": 8},
    "autoregressive": {"draft.architecture": "autoregressive", "draft.num_layers": 1},
    "gated": {"draft.markov_head": "gated"},
    "rnn": {"draft.markov_head": "rnn"},
    "one-layer": {"draft.num_layers": 1},
    "gamma-4": {"draft.block_size": 4},
    "gamma-12": {"draft.block_size": 12},
    "gamma-16": {"draft.block_size": 16},
}
RIVALS = ("dspark", "dflash", "autoregressive")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, metavar="DIR", help="of a run of `dspark-ray train`")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, metavar="FILE.jsonl", help="to decode")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a folder a variant, and pictures")
    parser.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=400, metavar="N", help="optimiser steps of each")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="prompts of each file")
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N")
    parser.add_argument("--model", metavar="T", help="the target (default: the demo's)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for every variant's training")
    parser.add_argument("--quick", action="store_true", help="20 steps, 2 prompts of each file, the rivals alone")
    args = parser.parse_args(argv)
    if args.quick:
        args.steps, args.limit, args.max_tokens = 20, 2, 32
        args.variants = [name for name in args.variants if name in RIVALS]
    records = {name: train(name, args) for name in args.variants}
    judged = evaluate(args)
    print_table(records, judged)
    print(json.dumps(summary(args, records, judged)))


def train(name: str, args: argparse.Namespace) -> TrainingRecord:
    """The validation record of the last step, from a run of this call or an earlier one."""
    folder = RunFolder(args.out / name)
    overrides = [f"{key}={value}" for key, value in VARIANTS[name].items()] + args.set
    command = ["train", "--local", "--stages", "train", "--corpus", args.corpus, "--out", folder.drafter]
    target = ["--target", args.model] if args.model else []
    sets = [word for override in overrides for word in ("--set", override)]
    print(f"training {name}", file=sys.stderr, flush=True)
    run([*command, *target, "--steps", args.steps, *sets])
    return folder.read_metrics()[-1]


def evaluate(args: argparse.Namespace) -> dict[str, object]:
    """The JSON line of `dspark-ray evaluate` over all variants."""
    command = ["evaluate", "--prompts", *args.prompts, "--limit", args.limit, "--max-tokens", args.max_tokens]
    drafters = [f"{name}={args.out / name}" for name in args.variants]
    target = ["--model", args.model] if args.model else []
    output = run([*command, *target, "--out", args.out / "pictures", "--drafters", *drafters])
    judged: dict[str, object] = json.loads(output.splitlines()[-1])
    return judged


def run(words: Sequence[object]) -> str:
    """A command of `dspark-ray` in a process of its own; its progress is shown, its stdout returned."""
    program = "import sys; from dspark_ray.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, words)], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"`dspark-ray {' '.join(map(str, words))}` ended with status {done.returncode}")
    return done.stdout


def print_table(records: dict[str, TrainingRecord], judged: dict[str, object]) -> None:
    drafters = judged["drafters"]
    assert isinstance(drafters, dict)
    temperatures = list(next(iter(drafters.values())))
    table = Table("drafter", "teacher-forced length", *(f"accepted length {name}" for name in temperatures), "minutes")
    for name, record in records.items():
        lengths = (f"{drafters[name][key]['mean_accepted_length']:.3f}" for key in temperatures)
        table.add_row(name, f"{record.accepted_length:.3f}", *lengths, f"{record.seconds / 60:.1f}")
    Console().print(table)


def summary(
    args: argparse.Namespace, records: dict[str, TrainingRecord], judged: dict[str, object]
) -> dict[str, object]:
    return {
        **judged,
        "benchmark": "rivals",
        "steps": args.steps,
        "settings": args.set,
        "training": {name: json.loads(record.to_json()) for name, record in records.items()},
        "machine": f"{os.cpu_count()} CPUs {platform.machine()}",
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    main()
