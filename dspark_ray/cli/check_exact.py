"""`dspark-ray check-exact`: every drafter kind and policy against transformers' generate(), then one JSON line."""

import asyncio
import json
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from transformers.utils.logging import disable_progress_bar

from dspark_ray.algorithm.cost_table import CostTable
from dspark_ray.cli.arguments import config_from
from dspark_ray.cli.engines import open_engine_on, ray_if_needed
from dspark_ray.cli.progress import advancing, progress_bar
from dspark_ray.config import DEMO_DRAFTER, AppConfig
from dspark_ray.errors import ConfigError
from dspark_ray.exactness import Mode, Outcome, Prompt, Reference, check_engine, read_prompts
from dspark_ray.models.checkpoints import save_draft_model
from dspark_ray.models.derive import first_layers, without_heads
from dspark_ray.models.resolve import resolve_drafter, resolve_model
from dspark_ray.offline import load_tokenizer
from dspark_ray.training.config import DraftShapeConfig
from dspark_ray.training.initialisation import draft_config_json, new_draft_model

DRAFT_LM_SHARE = 0.8  # of the target's layers, from the first: it agrees with the target about every other token


@dataclass(frozen=True, slots=True)
class Variant:
    """One engine to check."""

    executor: str
    drafter: str
    policy: str

    def __str__(self) -> str:
        return f"{self.executor} {self.drafter}/{self.policy}"


@dataclass(frozen=True, slots=True)
class Drafters:
    """Where the checkpoint of each drafter kind lies, for kinds that have one."""

    folders: dict[str, str]

    def configure(self, config: AppConfig, variant: Variant) -> AppConfig:
        drafter = config.drafter.model_copy(
            update={"kind": variant.drafter, "model": self.folders.get(variant.drafter)}
        )
        # Cut-out drafters live in a scratch folder: a cost table cached for them would never be found again.
        verification = config.verification.model_copy(update={"policy": variant.policy, "cache_cost_table": False})
        return config.model_copy(update={"drafter": drafter, "verification": verification})


def run(args: Namespace) -> int:
    disable_progress_bar()  # transformers' own, of loading weights
    config = config_from(args)
    console = Console(stderr=True)
    torch.set_num_threads(config.target.num_threads)
    folder = resolve_model(config.target.model)
    prompts = read_prompts(args.prompts, args.limit, load_tokenizer(folder))
    reference = Reference(folder, dtype_of(config), args.max_tokens)
    with progress_bar(console) as progress:
        _generate_references(reference, prompts, args.modes, progress)
        with tempfile.TemporaryDirectory(prefix="dspark-check-") as scratch, ray_if_needed(args.executor):
            drafters = derive_drafters(config, folder, args, Path(scratch))
            results = asyncio.run(_check_all(config, drafters, reference, prompts, args, progress))
    return report(results, args, config)


def dtype_of(config: AppConfig) -> torch.dtype:
    """The dtype of both sides."""
    if config.target.dtype == "auto":
        raise ConfigError("check-exact compares two programs in one dtype: give --dtype float32, bfloat16 or float16")
    dtype = getattr(torch, config.target.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def variants_of(args: Namespace) -> Iterator[Variant]:
    """Every combination asked for; without a drafter the policy makes no difference, so `none` is run once."""
    for executor in args.executor:
        if "none" in args.drafters:
            yield Variant(executor, "none", "none")
        for policy in args.policies:
            for drafter in args.drafters:
                if drafter != "none":
                    yield Variant(executor, drafter, policy)


def derive_drafters(config: AppConfig, target: Path, args: Namespace, scratch: Path) -> Drafters:
    """The DSpark drafter as configured; the others as given, else cut out of what there is."""
    folders: dict[str, str] = {}
    if {"dspark", "dflash"} & set(args.drafters):
        dspark = resolve_drafter(config.drafter.model_copy(update={"kind": "dspark"}), config.target.model)
        folders["dspark"] = str(dspark or DEMO_DRAFTER)
    if "dflash" in args.drafters:
        folders["dflash"] = args.dflash or str(without_heads(Path(folders["dspark"]), scratch / "dflash"))
    if "autoregressive" in args.drafters:
        folders["autoregressive"] = args.autoregressive or str(untrained(target, scratch / "autoregressive"))
    if "draft_model" in args.drafters:
        folders["draft_model"] = args.draft_lm or str(_default_draft_lm(target, scratch / "draft_lm"))
    return Drafters(folders)


def untrained(target: Path, out: Path) -> Path:
    """An autoregressive drafter that starts from the target's last layer: it drafts badly, but not nothing."""
    config = draft_config_json(target, DraftShapeConfig(architecture="autoregressive"), mask_token_id=0)
    save_draft_model(new_draft_model(target, config, None, seed=0), config, out)
    return out


def _default_draft_lm(target: Path, out: Path) -> Path:
    layers = json.loads((target / "config.json").read_text())["num_hidden_layers"]
    return first_layers(target, out, max(1, int(layers * DRAFT_LM_SHARE)))


def _generate_references(reference: Reference, prompts: list[Prompt], modes: list[Mode], progress: Progress) -> None:
    for mode in modes:
        task = progress.add_task(f"generate() {mode}", total=len(prompts))
        for prompt in prompts:
            reference.output(prompt, mode)
            progress.advance(task)


async def _check_all(
    config: AppConfig,
    drafters: Drafters,
    reference: Reference,
    prompts: list[Prompt],
    args: Namespace,
    progress: Progress,
) -> list[tuple[Variant, Outcome]]:
    results = []
    tables: dict[tuple[str, str], CostTable] = {}  # one profile an executor and drafter
    for variant in variants_of(args):
        chosen = drafters.configure(config, variant)
        key = (variant.executor, variant.drafter)
        async with open_engine_on(variant.executor, chosen, tables.get(key)) as engine:
            if engine.cost_table is not None:
                tables.setdefault(key, engine.cost_table)
            for mode in args.modes:
                for concurrency in args.concurrency:
                    task = progress.add_task(f"{variant} {mode} x{concurrency}", total=len(prompts))
                    started = time.perf_counter()
                    outcome = await check_engine(
                        engine,
                        reference,
                        prompts,
                        mode,
                        concurrency,
                        args.max_tokens,
                        advancing(progress, task),
                    )
                    results.append((variant, outcome))
                    print_outcome(variant, outcome, time.perf_counter() - started, args.tie_gap)
    return results


def print_outcome(variant: Variant, outcome: Outcome, seconds: float, tie_gap: float) -> None:
    """A line for the engine as soon as it is done, and one for each difference with its gaps."""
    accepted = f"{outcome.counts.accepted}/{outcome.counts.admitted}/{outcome.counts.drafted}"
    print(
        f"{variant!s:34} {outcome.mode:8} x{outcome.concurrency:<3} equal {outcome.equal}/{outcome.cases}"
        f"  ties {outcome.num_ties(tie_gap)}  wrong {outcome.num_wrong(tie_gap)}"
        f"  accepted/verified/drafted {accepted}  {seconds:.1f} s",
        flush=True,
    )
    for difference in outcome.differences:
        kind = "tie" if difference.is_tie(tie_gap) else "WRONG"
        print(
            f"    {kind} {difference.source} token {difference.position}: expected {difference.expected}, got "
            f"{difference.got}; gap {difference.gap:.3g}, top-2 gap {difference.top2_gap:.3g}",
            flush=True,
        )


def report(results: list[tuple[Variant, Outcome]], args: Namespace, config: AppConfig) -> int:
    """The JSON line; 1 if a difference is not a tie."""
    gap = args.tie_gap
    outcomes = [outcome for _, outcome in results]
    wrong = sum(outcome.num_wrong(gap) for outcome in outcomes)
    summary = {
        "benchmark": "check-exact",
        "model": config.target.model,
        "dtype": str(dtype_of(config)).removeprefix("torch."),
        "executors": args.executor,
        "max_tokens": args.max_tokens,
        "runs": len(results),
        "cases": sum(outcome.cases for outcome in outcomes),
        "equal": sum(outcome.equal for outcome in outcomes),
        "ties": sum(outcome.num_ties(gap) for outcome in outcomes),
        "wrong": wrong,
        "tie_gap": gap,
        "differences": [
            {"engine": str(variant), "mode": outcome.mode, "concurrency": outcome.concurrency, **asdict(difference)}
            for variant, outcome in results
            for difference in outcome.differences
        ],
    }
    print(json.dumps(summary))
    return 1 if wrong else 0
