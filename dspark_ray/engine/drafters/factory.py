"""Builds the configured drafter: the one place where checkpoints, calibration, page counts and drafter classes meet."""

import logging
from pathlib import Path
from typing import Any

import torch

from dspark_ray.algorithm.mode_calibration import ModeCalibration
from dspark_ray.config import AppConfig
from dspark_ray.engine.drafters.autoregressive import AutoregressiveDrafter
from dspark_ray.engine.drafters.base import Drafter
from dspark_ray.engine.drafters.draft_model import DraftModelDrafter
from dspark_ray.engine.drafters.dspark import DSparkDrafter
from dspark_ray.engine.drafters.ngram import NgramDrafter
from dspark_ray.engine.memory import num_pages_that_fit
from dspark_ray.engine.target_runner import resolve_num_draft_tokens
from dspark_ray.errors import ConfigError
from dspark_ray.models.autoregressive_draft import AutoregressiveDraftModel, DraftNetwork
from dspark_ray.models.checkpoints import load_autoregressive_model, load_draft_model
from dspark_ray.models.draft_config import DraftConfig, read_draft_config
from dspark_ray.models.resolve import resolve_drafter, resolve_model
from dspark_ray.models.target import TargetModel, read_config, resolve_device, resolve_dtype

logger = logging.getLogger(__name__)

CALIBRATION_FILE = "calibration.json"
MEMORY_SHARE = 0.1  # of kv_memory_fraction: a drafter caches far fewer bytes a token than its target


def build_drafter(config: AppConfig) -> Drafter | None:
    """The drafter that `config.drafter` names, None for kind none.

    Raises ConfigError (CheckpointError, UnsupportedModelError) if it does not fit the target or the configuration.
    """
    drafter = config.drafter
    if drafter.kind == "none":
        return None
    if drafter.calibration is not None and not drafter.reads_features:
        raise ConfigError(
            f"drafter.calibration is set, but drafter.kind {drafter.kind} has no confidences to calibrate"
        )
    if drafter.kind == "ngram":
        return NgramDrafter(
            num_draft_tokens=resolve_num_draft_tokens(config),
            ngram_min=drafter.ngram_min,
            ngram_max=drafter.ngram_max,
            fallback_confidence=config.verification.fallback_confidence,
        )
    folder, target_folder = str(resolve_drafter(drafter, config.target.model)), str(resolve_model(config.target.model))
    if drafter.kind == "draft_model":
        return _build_draft_model(config, folder, target_folder)
    return _build_feature_drafter(config, folder, target_folder)


def _build_feature_drafter(config: AppConfig, folder: str, target_folder: str) -> DSparkDrafter | AutoregressiveDrafter:
    """A drafter whose checkpoint is a draft network over the target's features."""
    drafter, device = config.drafter, resolve_device(config.drafter.device)
    draft_config = read_draft_config(folder)
    dtype = resolve_dtype(drafter.dtype, device, draft_config.transformer)
    load = load_autoregressive_model if drafter.kind == "autoregressive" else load_draft_model
    model: DraftNetwork = load(folder, target_folder, dtype=dtype, device=device)
    num_draft_tokens = resolve_num_draft_tokens(config)
    options: dict[str, Any] = {
        "num_draft_tokens": num_draft_tokens,
        "num_pages": _num_pages(config, _context_bytes(draft_config, dtype), draft_config.max_positions, device),
        "page_size": config.engine.page_size,
        "draft_top_k": drafter.draft_top_k,
        "calibration": _calibration(config, folder, num_draft_tokens),
    }
    if isinstance(model, AutoregressiveDraftModel):
        return AutoregressiveDrafter(model, **options)
    return DSparkDrafter(model, **options)


def _build_draft_model(config: AppConfig, folder: str, target_folder: str) -> DraftModelDrafter:
    drafter, device = config.drafter, resolve_device(config.drafter.device)
    dtype = resolve_dtype(drafter.dtype, device, read_config(folder))
    expected = int(read_config(target_folder).get_text_config().vocab_size)
    if (got := int(read_config(folder).get_text_config().vocab_size)) != expected:
        raise ConfigError(
            f"the draft model {folder} has a vocabulary of {got} tokens, its target one of {expected}; "
            "drafter.kind draft_model needs a model with the target's own tokenizer"
        )
    model = TargetModel.load(folder, dtype=dtype, device=device)
    return DraftModelDrafter(
        model,
        num_draft_tokens=resolve_num_draft_tokens(config),
        num_pages=_num_pages(config, model.kv_bytes_per_token(), model.max_positions, device),
        page_size=config.engine.page_size,
        draft_top_k=drafter.draft_top_k,
    )


def _calibration(config: AppConfig, folder: str, num_draft_tokens: int) -> ModeCalibration | None:
    path = Path(config.drafter.calibration or Path(folder) / CALIBRATION_FILE)
    if config.drafter.calibration is None and not path.is_file():
        logger.warning(
            "confidences are not calibrated: no %s in %s; they are used as they are", CALIBRATION_FILE, folder
        )
        return None
    calibration = ModeCalibration.load(path)
    if calibration.num_draft_tokens < num_draft_tokens:
        raise ConfigError(
            f"{path} covers {calibration.num_draft_tokens} draft positions, but {num_draft_tokens} are drafted; "
            "calibrate this drafter again or lower num_draft_tokens"
        )
    return calibration


def _context_bytes(config: DraftConfig, dtype: torch.dtype) -> int:
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def _num_pages(config: AppConfig, token_bytes: int, max_positions: int, device: torch.device) -> int:
    """Pages for every sequence at full length if memory allows; the longest unused contexts are forgotten if not."""
    engine = config.engine
    longest = min(config.target.max_model_len or max_positions, max_positions)
    pages_each = -(-longest // engine.page_size) + 1 + 32 // engine.page_size  # and the draft block behind the context
    return num_pages_that_fit(
        token_bytes * engine.page_size,
        engine.kv_memory_fraction * MEMORY_SHARE,
        device,
        most=engine.max_num_seqs * pages_each,
    )
