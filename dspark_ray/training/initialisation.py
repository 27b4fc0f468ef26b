"""A new draft network for a target: its configuration, and weights that start from the target's last layers.

Reads the target's safetensors by name; loads no target. Where the target has no tensor of the wanted name and shape the
draft layer starts at random, which the returned report says.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dspark_ray.errors import ConfigError
from dspark_ray.models.autoregressive_draft import AutoregressiveLayer, DraftNetwork, build_network
from dspark_ray.models.checkpoints import read_target_embeddings, read_tensors, tensor_files
from dspark_ray.models.draft_config import parse_draft_config, read_json
from dspark_ray.models.draft_model import DraftLayer
from dspark_ray.training.config import DraftShapeConfig

logger = logging.getLogger(__name__)

DEFAULT_TAPS = 5
RANDOM_STD = 0.02
PROJECTIONS = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")
ARCHITECTURES = {
    "dspark": "Qwen3DSparkModel",
    "dflash": "DFlashDraftModel",
    "autoregressive": "AutoregressiveDraftModel",
}


def draft_config_json(target_folder: Path, shape: DraftShapeConfig, mask_token_id: int) -> dict[str, Any]:
    """config.json (DeepSpec field names) of a drafter with the target's sizes, RoPE and vocabulary."""
    raw = read_json(target_folder / "config.json")
    target = raw.get("text_config") or raw
    heads, hidden = int(target["num_attention_heads"]), int(target["hidden_size"])
    rope = target.get("rope_parameters") or {"rope_type": "default", "rope_theta": target.get("rope_theta", 10000.0)}
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[shape.architecture]],
        "model_type": "qwen3",
        "vocab_size": int(target["vocab_size"]),
        "hidden_size": hidden,
        "intermediate_size": shape.intermediate_size or int(target["intermediate_size"]),
        "num_hidden_layers": 1 if shape.architecture == "autoregressive" else shape.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shape.num_key_value_heads or heads,
        "head_dim": int(target.get("head_dim") or hidden // heads),
        "hidden_act": "silu",
        "rms_norm_eps": float(target.get("rms_norm_eps", 1e-6)),
        "rope_parameters": rope,
        "max_position_embeddings": int(target["max_position_embeddings"]),
        "attention_bias": False,
        "tie_word_embeddings": False,
        "num_target_layers": int(target["num_hidden_layers"]),
        "target_layer_ids": list(shape.target_layer_ids or spread_layers(int(target["num_hidden_layers"]))),
        "block_size": shape.block_size,
        "dtype": "bfloat16",
    }
    if shape.architecture != "autoregressive":
        config["mask_token_id"] = mask_token_id
    if shape.architecture == "dspark":
        config |= {
            "markov_head_type": shape.markov_head,
            "markov_rank": shape.markov_rank,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
    if shape.draft_vocab_size is not None and shape.draft_vocab_size < config["vocab_size"]:
        config["draft_vocab_size"] = shape.draft_vocab_size
    return config


def spread_layers(num_target_layers: int, count: int = DEFAULT_TAPS) -> list[int]:
    """Layers from the second to the last but one, evenly spread (DeepSpec's choice); fewer where there are fewer."""
    last = num_target_layers - 2
    if last < 0:
        return [-1]
    first = min(1, last)
    count = min(count, last - first + 1)
    return [first + round(i * (last - first) / max(1, count - 1)) for i in range(count)]


def new_draft_model(
    target_folder: Path, config_json: dict[str, Any], draft_token_ids: Sequence[int] | None, seed: int
) -> DraftNetwork:
    """A trainable float32 model: embeddings and head are the target's and frozen, layers its last layers' weights.

    Args: draft_token_ids: target ids of a pruned draft vocabulary, increasing. Raises ConfigError if they do not fit.
    """
    torch.manual_seed(seed)
    config = parse_draft_config(config_json)
    if config.pruned_vocabulary and len(draft_token_ids or ()) != config.draft_vocab_size:
        raise ConfigError(
            f"draft_vocab_size is {config.draft_vocab_size}, but {len(draft_token_ids or ())} draft tokens were given"
        )
    model = build_network(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "markov" not in name:
            nn.init.normal_(parameter, std=RANDOM_STD)
    share_vocabulary(model, target_folder, draft_token_ids)
    started = _start_from_target(model, target_folder)
    logger.info("draft layers that start from the target's: %d of %d", started, config.num_layers)
    _start_heads(model)
    return model


def share_vocabulary(model: DraftNetwork, target_folder: Path, draft_token_ids: Sequence[int] | None) -> None:
    """Give the model the target's frozen embeddings and (the chosen rows of) its head."""
    shared = read_target_embeddings(str(target_folder))
    head = shared.lm_head
    if draft_token_ids is not None:
        model.draft_to_target = torch.tensor(draft_token_ids, dtype=torch.int64)
        head = head[model.draft_to_target]
    model.embed_tokens.weight = nn.Parameter(shared.embed_tokens.float(), requires_grad=False)
    model.lm_head.weight = nn.Parameter(head.float(), requires_grad=False)


def _start_heads(model: DraftNetwork) -> None:
    """No transition bias and confidence one half at first, whatever the hidden states are."""
    if model.markov_head is not None:
        nn.init.normal_(model.markov_head.markov_w1.weight, std=1.0)
        nn.init.zeros_(model.markov_head.markov_w2.weight)
    if model.confidence_head is not None:
        nn.init.zeros_(model.confidence_head.proj.weight)
        nn.init.zeros_(model.confidence_head.proj.bias)


@torch.no_grad()
def _start_from_target(model: DraftNetwork, folder: Path) -> int:
    """Copy the last layers, the final norm, the last layer's input norm, and let `fc` pass the last tap through."""
    config, files = model.config, tensor_files(str(folder))
    names = {name.removeprefix("model."): name for name in files}

    def read(name: str) -> torch.Tensor | None:
        full = names.get(name)
        return None if full is None else read_tensors(files, [full])[full].float()

    _copy(model.norm.weight, read("norm.weight"))
    num_target_layers = config.num_target_layers or 0
    _copy(model.hidden_norm.weight, read(f"layers.{num_target_layers - 1}.input_layernorm.weight"))
    if config.target_hidden_size == config.hidden_size:
        nn.init.normal_(model.fc.weight, std=RANDOM_STD / len(config.target_layer_ids))
        model.fc.weight[:, -config.hidden_size :] = torch.eye(config.hidden_size)
    started = 0
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, DraftLayer | AutoregressiveLayer)
        source = f"layers.{num_target_layers - config.num_layers + index}."
        tensors = {name: read(source + name) for name in _layer_tensors(layer)}
        norms = [layer.input_layernorm.weight]
        if isinstance(layer, AutoregressiveLayer):  # this norm is of embeddings, as the target's first is
            tensors["input_layernorm.weight"] = read("layers.0.input_layernorm.weight")
            norms.append(model.hidden_norm.weight)
        started += _start_layer(layer, tensors, norms)
    return started


def _layer_tensors(layer: nn.Module) -> list[str]:
    return [name for name, _ in layer.named_parameters()]


def _start_layer(
    layer: DraftLayer | AutoregressiveLayer, source: dict[str, torch.Tensor | None], input_norms: Sequence[torch.Tensor]
) -> bool:
    """True if every matrix was taken over. Args: input_norms: weights of the norms of what is projected, in order."""
    attention, whole = layer.self_attn, True
    for name, parameter in layer.named_parameters():
        tensor = source[name]
        if tensor is not None and name in ("self_attn.k_proj.weight", "self_attn.v_proj.weight"):
            tensor = _repeat_heads(tensor, parameter.shape[0], attention.head_dim)
        if tensor is not None and name in PROJECTIONS:
            tensor = _behind_embeddings(tensor, parameter)
        copied = _copy(parameter, tensor)
        whole = whole and (copied or parameter.dim() == 1)
    for norm, projection in ((attention.q_norm, attention.q_proj), (attention.k_norm, attention.k_proj)):
        if source[f"self_attn.{'q' if norm is attention.q_norm else 'k'}_norm.weight"] is None:
            norm.weight.fill_(_typical_rms(projection.weight, torch.cat(list(input_norms))))
    return whole


def _copy(parameter: nn.Parameter, tensor: torch.Tensor | None) -> bool:
    if tensor is None or tensor.shape != parameter.shape:
        return False
    parameter.copy_(tensor)
    return True


def _repeat_heads(weight: torch.Tensor, rows: int, head_dim: int) -> torch.Tensor:
    """Key/value heads repeated to as many as the drafter has, in the order in which query heads share them."""
    heads = weight.unflatten(0, (-1, head_dim))
    if rows % head_dim or (rows // head_dim) % len(heads):
        return weight
    return heads.repeat_interleave(rows // head_dim // len(heads), dim=0).flatten(0, 1)


def _behind_embeddings(weight: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """The target's projection for the feature half of an entry, what the parameter holds for the embedding half."""
    num_before = parameter.shape[1] - weight.shape[1]
    if num_before <= 0 or parameter.shape[0] != weight.shape[0]:
        return weight
    return torch.cat([parameter[:, :num_before], weight], dim=1)


def _typical_rms(projection: torch.Tensor, norm: torch.Tensor) -> float:
    """RMS of a projection of unit-variance inputs times the norm's weights: the target itself norms no queries."""
    return float((projection * norm).pow(2).sum(1).mean().sqrt())
