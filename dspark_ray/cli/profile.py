"""`dspark-ray profile`: the cost table of this machine as JSON and as a picture."""

import asyncio
from argparse import Namespace
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from dspark_ray.algorithm.cost_table import CostTable
from dspark_ray.cli.arguments import config_from
from dspark_ray.config import AppConfig
from dspark_ray.engine.local_executor import LocalExecutor


def run(args: Namespace) -> int:
    disable_progress_bar()  # transformers' own, of loading weights
    config = config_from(args)
    picture = args.picture or args.out.with_suffix(".png")
    table = asyncio.run(_measure(config))
    table.save(args.out)
    draw(table, picture)
    _print(table)
    print(f"wrote {args.out} and {picture}; use it with --cost-table {args.out} or verification.cost_table")
    return 0


async def _measure(config: AppConfig) -> CostTable:
    executor = LocalExecutor(config)
    try:
        await executor.start()
        return await executor.profile()
    finally:
        await executor.close()


def draw(table: CostTable, path: Path) -> None:
    """Step time and steps per second over the tokens of a step."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(table.batch_tokens, [seconds * 1e3 for seconds in table.step_seconds], marker="o")
    left.set(title="step time", xlabel="tokens in the step", ylabel="ms", ylim=(0, None))
    right.plot(table.batch_tokens, [table.steps_per_second(tokens) for tokens in table.batch_tokens], marker="o")
    right.set(title="SPS(B), drafting included", xlabel="tokens in the step", ylabel="steps a second", ylim=(0, None))
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
    figure.suptitle(", ".join(f"{key} {value}" for key, value in table.provenance.items()), fontsize=7, wrap=True)
    figure.savefig(path, dpi=120)


def _print(table: CostTable) -> None:
    rows = Table("tokens", "step ms", "steps/s")
    for tokens, seconds in zip(table.batch_tokens, table.step_seconds, strict=True):
        rows.add_row(str(tokens), f"{seconds * 1e3:.1f}", f"{table.steps_per_second(tokens):.1f}")
    Console().print(rows)
    print(f"drafting adds {table.draft_seconds * 1e3:.1f} ms to a step")
