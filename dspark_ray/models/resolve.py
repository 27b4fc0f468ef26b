"""From the name of a model to a local folder. Knows nothing of what is inside it and imports no torch."""

import os
import sys
from pathlib import Path

import httpx
from huggingface_hub import snapshot_download

from dspark_ray.config import DEMO_DRAFTER, DEMO_MODEL, DrafterConfig
from dspark_ray.errors import ConfigError
from dspark_ray.models.demo import ensure_demo_model

SHIPPED_DRAFTERS = Path(__file__).resolve().parent.parent / "drafters"
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


def cache_folder() -> Path:
    """Where converted models live: XDG_CACHE_HOME if set, else the platform's own cache folder."""
    chosen = os.environ.get("XDG_CACHE_HOME")
    if chosen:
        return Path(chosen) / "dspark_ray"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "dspark_ray"
    return Path.home() / ".cache" / "dspark_ray"


def resolve_model(name: str) -> Path:
    """The folder of a model: the demo name, a folder, or a Hugging Face id, fetched if it must be.

    Raises ConfigError where there is no such model; the message says what was looked for and what to do.
    """
    if name == DEMO_MODEL:
        return ensure_demo_model(cache_folder())
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _checked_folder(folder)
    if folder.is_absolute() or name.startswith((".", "~")):
        raise ConfigError(f"model folder {name!r} does not exist; give a folder, a Hugging Face id or {DEMO_MODEL!r}")
    return _from_hub(name)


def resolve_drafter(config: DrafterConfig, target_model: str = DEMO_MODEL) -> Path | None:
    """The drafter's folder; None for kinds that load no checkpoint.

    Without `drafter.model` the shipped drafter serves the demo target; any other target needs its own.
    """
    if config.kind in ("ngram", "none"):
        return None
    if config.model is not None:
        return SHIPPED_DRAFTERS / DEMO_DRAFTER if config.model == DEMO_DRAFTER else resolve_model(config.model)
    if config.kind == "draft_model":
        raise ConfigError(
            "drafter.kind is draft_model but drafter.model is not set: give the folder or Hugging Face id of a small "
            "causal LM with the target's vocabulary"
        )
    if target_model != DEMO_MODEL:
        raise ConfigError(
            f"no drafter is shipped for {target_model!r}: set drafter.model to the folder or Hugging Face id of a "
            f"drafter of kind {config.kind} trained for it, or drafter.kind to ngram or none"
        )
    return SHIPPED_DRAFTERS / DEMO_DRAFTER


def _checked_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model folder {str(folder)!r} has no config.json")
    return folder.resolve()


def _from_hub(name: str) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except (OSError, ValueError, httpx.HTTPError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"model {name!r} is neither a folder nor {DEMO_MODEL!r}, and could not be had from the Hugging Face Hub "
            f"({type(error).__name__}: {first_line}). Give a folder, check the id and the network, or log in with "
            "`hf auth login` where the model is gated"
        ) from error
