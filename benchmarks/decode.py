"""Decoding speed at temperature 0, one request at a time: DSpark against plain decoding in the same engine.

    python benchmarks/decode.py [--executor local|ray] [--quick]

Every prompt runs with and without drafts, one after the other in alternating order, so that whatever else the machine
does falls on both. Ends in one JSON line.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from dspark_ray.cli.arguments import add_config_options, config_from
from dspark_ray.cli.engines import open_engine_on, ray_if_needed
from dspark_ray.config import AppConfig
from dspark_ray.engine.engine import Engine
from dspark_ray.models.resolve import resolve_model
from dspark_ray.offline import Completion, chat_prompt, complete, load_tokenizer
from dspark_ray.request import GenerationRequest, SamplingParams

PROMPTS = {
    "chat": "Compose a short travel blog post about a recent trip to Hawaii, with one cultural experience.",
    "code": "Write a Python function that returns the n-th Fibonacci number, with a docstring and an example.",
    "maths": "A train travels 60 km in 45 minutes. What is its speed in km/h? Reason step by step.",
    "facts": "Explain how photosynthesis works, in simple words, as a numbered list.",
}


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt, decoded both ways in one turn."""

    name: str
    drafted: Completion
    plain: Completion


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executor", choices=("local", "ray"), default="local")
    parser.add_argument("--quick", action="store_true", help="one round of 48 tokens instead of three of 128")
    parser.add_argument("--prompts", nargs="*", type=Path, default=[], metavar="FILE", help="first line of each JSONL")
    add_config_options(parser)
    args = parser.parse_args(argv)
    disable_progress_bar()
    rounds, max_tokens = (1, 48) if args.quick else (3, 128)
    config = config_from(args)
    tokenizer = load_tokenizer(resolve_model(config.target.model))
    prompts = {name: chat_prompt(tokenizer, text) for name, text in _texts(args.prompts).items()}

    async def measure() -> tuple[list[Pair], dict[str, object]]:
        async with open_engine_on(args.executor, config) as engine:
            await _pair(engine, "warm-up", next(iter(prompts.values())), 16, 0)
            pairs = [
                await _pair(engine, name, prompt, max_tokens, turn)
                for turn in range(rounds)
                for name, prompt in prompts.items()
            ]
            return pairs, engine.stats()["target"]

    with ray_if_needed([args.executor]):
        pairs, target = asyncio.run(measure())
    _print_table(pairs)
    print(json.dumps(summary(pairs, config, args.executor, max_tokens, target)))


def _texts(files: list[Path]) -> dict[str, str]:
    return {file.stem: json.loads(file.read_text().splitlines()[0])["turns"][0] for file in files} or PROMPTS


async def _pair(engine: Engine, name: str, prompt: tuple[int, ...], max_tokens: int, turn: int) -> Pair:
    """Both ways, drafts first in even turns."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    done = {}
    for speculation in (True, False) if turn % 2 == 0 else (False, True):
        request = GenerationRequest(f"{name}-{turn}-{speculation}", prompt, sampling, speculation=speculation)
        done[speculation] = await complete(engine, request)
    return Pair(name, done[True], done[False])


def speed(completions: list[Completion]) -> float:
    """Tokens behind the first of each completion over the time they took together."""
    tokens = sum(len(completion.token_ids) - 1 for completion in completions)
    return tokens / sum(completion.seconds - completion.first_seconds for completion in completions)


def summary(
    pairs: list[Pair], config: AppConfig, executor: str, max_tokens: int, target: dict[str, object]
) -> dict[str, object]:
    drafted, plain = [pair.drafted for pair in pairs], [pair.plain for pair in pairs]
    return {
        "benchmark": "decode",
        "model": config.target.model,
        "drafter": config.drafter.kind,
        "policy": config.verification.policy,
        "executor": executor,
        "target": target,
        "prompts": len({pair.name for pair in pairs}),
        "runs": len(pairs),
        "max_tokens": max_tokens,
        "tokens_per_second": round(speed(drafted), 2),
        "plain_tokens_per_second": round(speed(plain), 2),
        "speedup": round(speed(drafted) / speed(plain), 3),
        "accepted_length": round(statistics.fmean(completion.accepted_length for completion in drafted), 3),
        "same_tokens": sum(pair.drafted.token_ids == pair.plain.token_ids for pair in pairs),
        "machine": f"{os.cpu_count()} CPUs {platform.machine()}",
        "torch": torch.__version__,
    }


def _print_table(pairs: list[Pair]) -> None:
    table = Table("prompt", "DSpark tokens/s", "plain tokens/s", "speed-up", "accepted length", "same tokens")
    for name in dict.fromkeys(pair.name for pair in pairs):
        mine = [pair for pair in pairs if pair.name == name]
        fast, slow = speed([pair.drafted for pair in mine]), speed([pair.plain for pair in mine])
        length = statistics.fmean(pair.drafted.accepted_length for pair in mine)
        same = sum(pair.drafted.token_ids == pair.plain.token_ids for pair in mine)
        table.add_row(name, f"{fast:.1f}", f"{slow:.1f}", f"{fast / slow:.2f}", f"{length:.2f}", f"{same}/{len(mine)}")
    Console().print(table)


if __name__ == "__main__":
    main()
