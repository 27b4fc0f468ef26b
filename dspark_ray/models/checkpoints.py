"""Draft checkpoints on disk: safetensors from and into a draft network, every wrong, missing or extra tensor named.

Never reads pickles. What a checkpoint leaves out of embed_tokens and lm_head is the target's, of which only these two
tensors are read.
"""

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dspark_ray.errors import CheckpointError
from dspark_ray.models.autoregressive_draft import AutoregressiveDraftModel, DraftNetwork, build_network
from dspark_ray.models.draft_config import DraftConfig, check_against_target, read_draft_config, read_json
from dspark_ray.models.draft_model import DSparkDraftModel, FeatureProjection

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
VOCABULARY_MAPS = frozenset({"d2t", "t2d"})  # t2d is the inverse mask of d2t and not needed


class TargetEmbeddings(NamedTuple):
    """The two tensors that drafters share with their target; one and the same where the target ties them."""

    embed_tokens: torch.Tensor  # [V, d]
    lm_head: torch.Tensor  # [V, d]


def load_draft_model(
    folder: str, target: str | TargetEmbeddings | None, *, dtype: torch.dtype, device: torch.device | str
) -> DSparkDraftModel:
    """`load_draft_network` where only a drafter of whole blocks (DSpark or DFlash) will do."""
    model = load_draft_network(folder, target, dtype=dtype, device=device)
    if not isinstance(model, DSparkDraftModel):
        raise CheckpointError(f"{folder} holds an autoregressive drafter: set drafter.kind to autoregressive")
    return model


def load_autoregressive_model(
    folder: str, target: str | TargetEmbeddings | None, *, dtype: torch.dtype, device: torch.device | str
) -> AutoregressiveDraftModel:
    """`load_draft_network` where only an autoregressive drafter will do."""
    model = load_draft_network(folder, target, dtype=dtype, device=device)
    if not isinstance(model, AutoregressiveDraftModel):
        raise CheckpointError(f"{folder} holds a drafter of whole blocks: set drafter.kind to dspark or dflash")
    return model


def load_draft_network(
    folder: str, target: str | TargetEmbeddings | None, *, dtype: torch.dtype, device: torch.device | str
) -> DraftNetwork:
    """Load a drafter of any architecture, frozen and in eval mode.

    `target` is the target's folder (the drafter is then checked against its config.json), its embeddings, or None for
    a checkpoint that holds its own. Raises CheckpointError naming fields and tensors.
    """
    config = read_draft_config(folder)
    if isinstance(target, str):
        check_against_target(config, read_json(Path(target) / "config.json"))
    files = tensor_files(folder)
    tensors = read_tensors(files, files)
    draft_to_target = _vocabulary_map(config, tensors, folder)
    tensors.update(_shared_with_target(config, tensors, target, folder, draft_to_target))
    with torch.device("meta"):
        model = build_network(config)
    assign_tensors(model, tensors, folder, dtype=dtype, device=device)
    model.rotary_emb = Qwen3RotaryEmbedding(config.transformer).to(device)  # float32 whatever dtype the weights have
    model.draft_to_target = None if draft_to_target is None else draft_to_target.to(device)
    return model


def save_draft_model(model: DraftNetwork, config_json: dict[str, Any], folder: Path) -> None:
    """Write `folder` whole or not at all: config.json and bfloat16 weights in the DeepSpec layout.

    embed_tokens and lm_head, which are the target's, are left out; a pruned vocabulary adds d2t (offsets) and t2d
    (mask), as in the speculators format. Raises CheckpointError where the weights cannot be written.
    """
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name not in (EMBEDDING, HEAD)
    }
    if model.draft_to_target is not None:
        mapped = model.draft_to_target.cpu()
        tensors["d2t"] = mapped - torch.arange(len(mapped))
        tensors["t2d"] = torch.zeros(model.config.vocab_size, dtype=torch.bool).index_fill_(0, mapped, True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        whole = Path(scratch) / folder.name
        whole.mkdir()
        (whole / "config.json").write_text(json.dumps(config_json, indent=2) + "\n", encoding="utf-8")
        try:
            save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})
        except SafetensorError as error:
            raise CheckpointError(f"{folder / 'model.safetensors'} cannot be written: {error}") from error
        folder.mkdir(exist_ok=True)
        for file in whole.iterdir():  # weights and config are each replaced whole
            os.replace(file, folder / file.name)


def load_feature_projection(folder: str, *, dtype: torch.dtype, device: torch.device | str) -> FeatureProjection:
    """Load equation 2 alone: `fc` and `hidden_norm`."""
    config = read_draft_config(folder)
    with torch.device("meta"):
        projection = FeatureProjection(config)
    files = tensor_files(folder)
    wanted = [name for name in projection.state_dict() if name in files]
    assign_tensors(projection, read_tensors(files, wanted), folder, dtype=dtype, device=device)
    return projection


def read_target_embeddings(folder: str) -> TargetEmbeddings:
    """Read the target's embedding and output head, and nothing else, from its (perhaps sharded) safetensors."""
    files = tensor_files(folder)
    embedding = _name_ending_in(files, EMBEDDING, folder)
    if (head := _find_ending_in(files, HEAD)) is not None:
        tensors = read_tensors(files, [embedding, head])
        return TargetEmbeddings(tensors[embedding], tensors[head])
    config = read_json(Path(folder) / "config.json")
    if (config.get("text_config") or config).get("tie_word_embeddings", True) is False:
        raise CheckpointError(f"{folder} has no {HEAD} and tie_word_embeddings is false")
    tied = read_tensors(files, [embedding])[embedding]
    return TargetEmbeddings(tied, tied)


def tensor_files(folder: str) -> dict[str, Path]:
    """File of each tensor of a checkpoint folder, single or sharded."""
    root = Path(folder)
    index = root / "model.safetensors.index.json"
    if index.is_file():
        return {name: root / file for name, file in read_json(index)["weight_map"].items()}
    single = root / "model.safetensors"
    if not single.is_file():
        raise CheckpointError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")
    with _open(single) as file:
        return dict.fromkeys(file.keys(), single)


def read_tensors(files: dict[str, Path], names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Read the named tensors, opening each file once."""
    tensors: dict[str, torch.Tensor] = {}
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(files[name], []).append(name)
    for path, members in by_file.items():
        with _open(path) as file:
            tensors.update({name: file.get_tensor(name) for name in members})
    return tensors


def assign_tensors(
    module: nn.Module, tensors: dict[str, torch.Tensor], folder: str, *, dtype: torch.dtype, device: torch.device | str
) -> None:
    """Give a module built on the meta device its weights; raise CheckpointError if names or shapes differ."""
    expected = module.state_dict()
    missing, unexpected = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or unexpected:
        raise CheckpointError(
            f"{folder} does not fit its config.json: missing tensors {missing or 'none'}, "
            f"unexpected tensors {unexpected or 'none'}"
        )
    wrong = [
        f"{name} is {list(tensors[name].shape)}, expected {list(parameter.shape)}"
        for name, parameter in expected.items()
        if tensors[name].shape != parameter.shape
    ]
    if wrong:
        raise CheckpointError(f"{folder} has tensors of the wrong shape: {'; '.join(wrong)}")
    module.load_state_dict({name: tensor.to(device, dtype) for name, tensor in tensors.items()}, assign=True)
    module.requires_grad_(False).eval()


def _vocabulary_map(config: DraftConfig, tensors: dict[str, torch.Tensor], folder: str) -> torch.Tensor | None:
    """Target id of each draft id (d2t holds offsets: target = draft + d2t[draft]); takes the maps out of `tensors`."""
    maps = {name: tensors.pop(name) for name in VOCABULARY_MAPS & tensors.keys()}
    if not config.pruned_vocabulary:
        return None
    if "d2t" not in maps:
        raise CheckpointError(f"{folder} has a pruned vocabulary (draft_vocab_size) and needs the tensor d2t")
    offsets = maps["d2t"].long()
    if offsets.shape != (config.draft_vocab_size,):
        raise CheckpointError(f"d2t is {list(offsets.shape)}, expected [{config.draft_vocab_size}]")
    mapped = torch.arange(config.draft_vocab_size) + offsets
    if mapped.min() < 0 or mapped.max() >= config.vocab_size or len(mapped.unique()) != len(mapped):
        raise CheckpointError(f"d2t must map each draft id to its own target id in 0..{config.vocab_size - 1}")
    return mapped


def _shared_with_target(
    config: DraftConfig,
    tensors: dict[str, torch.Tensor],
    target: str | TargetEmbeddings | None,
    folder: str,
    draft_to_target: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """The target's tensors for those that the checkpoint leaves out; of a pruned head the rows of the draft tokens."""
    absent = [name for name in (EMBEDDING, HEAD) if name not in tensors]
    if not absent:
        return {}
    if target is None:
        raise CheckpointError(f"{folder} leaves out {absent}, which are the target's: give the target's folder")
    shared = read_target_embeddings(target) if isinstance(target, str) else target
    if shared.embed_tokens.shape[1] != config.hidden_size:
        raise CheckpointError(
            f"{folder} leaves out {absent}, but its hidden_size {config.hidden_size} is not the target's "
            f"{shared.embed_tokens.shape[1]}"
        )
    head = shared.lm_head if draft_to_target is None else shared.lm_head[draft_to_target]
    return {name: value for name, value in ((EMBEDDING, shared.embed_tokens), (HEAD, head)) if name in absent}


def _name_ending_in(files: dict[str, Path], suffix: str, folder: str) -> str:
    name = _find_ending_in(files, suffix)
    if name is None:
        raise CheckpointError(f"{folder} has no tensor named {suffix} or ending in .{suffix}")
    return name


def _find_ending_in(files: dict[str, Path], suffix: str) -> str | None:
    return min((name for name in files if name == suffix or name.endswith(f".{suffix}")), key=len, default=None)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
