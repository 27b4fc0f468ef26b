"""What a draft checkpoint's config.json says, checked field by field; three dialects, one dataclass, no weights.

Dialects: DeepSpec (flat), z-lab DFlash (`dflash_config` inside) and speculators (`transformer_layer_config` inside).
"""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

from transformers import Qwen3Config

from dspark_ray.errors import CheckpointError, ConfigError, UnsupportedModelError

MarkovHeadType = Literal["vanilla", "gated", "rnn"]
CheckpointKind = Literal["dspark", "dflash", "autoregressive", "draft_model"]


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """A validated draft configuration. `block_size` is gamma, the number of block positions that are run at once."""

    transformer: Qwen3Config  # sizes, RoPE and norms of the draft layers
    block_size: int
    autoregressive: bool  # one token after another, each from the layer's own output for the one before: no masks
    mask_token_id: int | None  # None: autoregressive
    target_layer_ids: tuple[int, ...]  # i: output of decoder layer i, -1: embeddings
    num_target_layers: int | None  # None: the checkpoint does not say
    sample_from_anchor: bool  # the anchor position predicts the first draft (DSpark), or the first mask does (DFlash)
    target_hidden_size: int
    draft_vocab_size: int  # less than vocab_size: a pruned vocabulary with a d2t map
    markov_head_type: MarkovHeadType | None
    markov_rank: int
    has_confidence_head: bool
    confidence_with_markov: bool

    @property
    def hidden_size(self) -> int:
        return int(self.transformer.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.transformer.vocab_size)

    @property
    def num_layers(self) -> int:
        return int(self.transformer.num_hidden_layers)

    @property
    def head_dim(self) -> int:
        return self.transformer.head_dim or self.hidden_size // self.transformer.num_attention_heads

    @property
    def num_kv_heads(self) -> int:
        return self.transformer.num_key_value_heads or self.transformer.num_attention_heads

    @property
    def max_positions(self) -> int:
        return int(self.transformer.max_position_embeddings)

    @property
    def first_prediction(self) -> int:
        """Block index whose output predicts the first draft."""
        return 0 if self.sample_from_anchor else 1

    @property
    def max_draft_tokens(self) -> int:
        return self.block_size - self.first_prediction

    @property
    def pruned_vocabulary(self) -> bool:
        return self.draft_vocab_size != self.vocab_size

    def resolve_num_draft_tokens(self, requested: int | None) -> int:
        """K: all the block predicts, or its first `requested` positions (the block is still run whole, as trained).

        Raises ConfigError when the block predicts fewer than requested.
        """
        if requested is not None and requested > self.max_draft_tokens:
            raise ConfigError(
                f"num_draft_tokens is {requested}, but a block of block_size {self.block_size} predicts "
                f"{self.max_draft_tokens} tokens; lower num_draft_tokens or leave it out"
            )
        return self.max_draft_tokens if requested is None else requested


def read_draft_config(folder: str) -> DraftConfig:
    """Read and check `folder`/config.json. Raises CheckpointError or UnsupportedModelError naming the field."""
    return parse_draft_config(read_json(Path(folder) / "config.json"))


def checkpoint_kind(folder: Path) -> CheckpointKind:
    """What a checkpoint folder holds, by its config.json: a drafter over features, or a causal LM."""
    raw = read_json(folder / "config.json")
    flat = _flatten(raw)
    if _is_autoregressive(flat):
        return "autoregressive"
    if _is_dspark(flat):
        return "dspark"
    return "dflash" if "block_size" in flat else "draft_model"


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist: expected a checkpoint folder with config.json") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def parse_draft_config(raw: dict[str, Any]) -> DraftConfig:
    """Check a config.json of any dialect."""
    flat = _flatten(raw)
    transformer = _transformer_config(flat)
    is_dspark, autoregressive = _is_dspark(flat), _is_autoregressive(flat)
    head_type, rank = _markov_head(flat)
    has_confidence = bool(flat.get("enable_confidence_head", is_dspark))
    with_markov = has_confidence and bool(flat.get("confidence_head_with_markov", rank > 0))
    if with_markov and rank == 0:
        raise CheckpointError("confidence_head_with_markov is true but markov_rank is 0: there is no Markov embedding")
    config = DraftConfig(
        transformer=transformer,
        block_size=_integer(flat, "block_size", least=1),
        autoregressive=autoregressive,
        mask_token_id=None if autoregressive else _integer(flat, "mask_token_id", least=0),
        target_layer_ids=_layer_ids(flat),
        num_target_layers=_integer(flat, "num_target_layers", least=1) if "num_target_layers" in flat else None,
        sample_from_anchor=bool(flat.get("sample_from_anchor", is_dspark or autoregressive)),
        target_hidden_size=int(flat.get("target_hidden_size") or transformer.hidden_size),
        draft_vocab_size=int(flat.get("draft_vocab_size") or transformer.vocab_size),
        markov_head_type=head_type,
        markov_rank=rank,
        has_confidence_head=has_confidence,
        confidence_with_markov=with_markov,
    )
    _check_ranges(config)
    return config


def check_against_target(config: DraftConfig, target: dict[str, Any]) -> None:
    """Raise CheckpointError unless the drafter was made for a target with this config.json."""
    text = target.get("text_config") or target
    if (layers := text.get("num_hidden_layers")) is not None:
        if config.num_target_layers not in (None, layers):
            raise CheckpointError(
                f"num_target_layers is {config.num_target_layers}, but the target has {layers} layers"
            )
        check_layer_range(config.target_layer_ids, int(layers))
    for field, ours in (("hidden_size", config.target_hidden_size), ("vocab_size", config.vocab_size)):
        if (theirs := text.get(field)) is not None and theirs != ours:
            raise CheckpointError(f"the drafter expects a target with {field} {ours}, but the target has {theirs}")


def check_layer_range(layer_ids: tuple[int, ...], num_target_layers: int) -> None:
    """The last layer is not allowed: its output is what the target itself predicts from (DeepSpec)."""
    for layer in layer_ids:
        if not -1 <= layer < num_target_layers - 1:
            raise CheckpointError(
                f"target_layer_ids contains {layer}; with {num_target_layers} target layers "
                f"-1 (embeddings) to {num_target_layers - 2} are allowed"
            )


def _flatten(raw: dict[str, Any]) -> dict[str, Any]:
    """One flat DeepSpec-like dict from any dialect."""
    inner = raw.get("transformer_layer_config") or {}
    flat = {**inner, **{key: value for key, value in raw.items() if key != "transformer_layer_config"}}
    for section in ("dflash_config", "dspark_config"):
        flat.update(raw.get(section) or {})
    if inner.get("model_type"):
        flat["model_type"] = inner["model_type"]
    if "target_layer_ids" not in flat and raw.get("aux_hidden_state_layer_ids") is not None:
        # speculators counts hidden states (0 is the embedding output), DeepSpec and DFlash count layers
        flat["target_layer_ids"] = [index - 1 for index in raw["aux_hidden_state_layer_ids"]]
    return {key: value for key, value in flat.items() if value is not None}


def _is_dspark(flat: dict[str, Any]) -> bool:
    names = [*flat.get("architectures", []), str(flat.get("speculators_model_type", ""))]
    return "dspark_config" in flat or any("dspark" in name.lower() for name in names)


def _is_autoregressive(flat: dict[str, Any]) -> bool:
    return any("autoregressive" in name.lower() for name in flat.get("architectures", []))


def _transformer_config(flat: dict[str, Any]) -> Qwen3Config:
    model_type = flat.get("model_type", "qwen3")
    if model_type != "qwen3":
        raise UnsupportedModelError(
            f"model_type of the drafter is {model_type!r}; only Qwen3-style draft layers are supported"
        )
    for field in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"):
        _integer(flat, field, least=1)
    layer_types = set(flat.get("layer_types") or ["full_attention"])
    if layer_types != {"full_attention"} or flat.get("use_sliding_window"):
        raise UnsupportedModelError(
            f"layer_types of the drafter are {sorted(layer_types)} and use_sliding_window is "
            f"{flat.get('use_sliding_window', False)}; only full_attention is supported"
        )
    sizes = {
        "num_key_value_heads": flat["num_attention_heads"],
        "head_dim": flat["hidden_size"] // flat["num_attention_heads"],
    }
    try:
        return Qwen3Config.from_dict({**sizes, **flat})
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(f"config.json of the drafter is not a valid Qwen3 configuration: {error}") from error


def _markov_head(flat: dict[str, Any]) -> tuple[MarkovHeadType | None, int]:
    rank = _integer(flat, "markov_rank", least=0) if "markov_rank" in flat else 0
    if rank == 0:
        return None, 0
    head_type = flat.get("markov_head_type", "vanilla")
    if head_type not in get_args(MarkovHeadType):
        raise CheckpointError(
            f"markov_head_type is {head_type!r}; expected one of {', '.join(get_args(MarkovHeadType))}"
        )
    return head_type, rank


def _layer_ids(flat: dict[str, Any]) -> tuple[int, ...]:
    ids = flat.get("target_layer_ids")
    if not isinstance(ids, list) or not ids or not all(type(layer) is int for layer in ids):
        raise CheckpointError(f"target_layer_ids must be a list of integers, got {ids!r}")
    if any(later <= earlier for earlier, later in pairwise(ids)):
        raise CheckpointError(f"target_layer_ids must be strictly increasing, got {ids}")
    return tuple(ids)


def _check_ranges(config: DraftConfig) -> None:
    if config.autoregressive:
        _check_autoregressive(config)
    if config.mask_token_id is not None and config.mask_token_id >= config.vocab_size:
        raise CheckpointError(f"mask_token_id is {config.mask_token_id}, but vocab_size is {config.vocab_size}")
    if config.max_draft_tokens < 1:
        raise CheckpointError("block_size is 1 with sample_from_anchor false: the block predicts nothing")
    if not 1 <= config.draft_vocab_size <= config.vocab_size:
        raise CheckpointError(f"draft_vocab_size is {config.draft_vocab_size}; expected 1..{config.vocab_size}")
    if config.transformer.num_attention_heads % config.num_kv_heads:
        raise CheckpointError(
            f"num_key_value_heads ({config.num_kv_heads}) must divide "
            f"num_attention_heads ({config.transformer.num_attention_heads})"
        )
    if config.num_target_layers is not None:
        check_layer_range(config.target_layer_ids, config.num_target_layers)
    elif config.target_layer_ids[0] < -1:
        raise CheckpointError(f"target_layer_ids contains {config.target_layer_ids[0]}; the least is -1 (embeddings)")


def _check_autoregressive(config: DraftConfig) -> None:
    """An autoregressive drafter is one layer without heads, and its anchor predicts the first draft."""
    for field, got, expected in (
        ("num_hidden_layers", config.num_layers, 1),
        ("markov_rank", config.markov_rank, 0),
        ("enable_confidence_head", config.has_confidence_head, False),
        ("sample_from_anchor", config.sample_from_anchor, True),
    ):
        if got != expected:
            raise CheckpointError(f"{field} is {got}, but an autoregressive drafter has {field} {expected}")


def _integer(flat: dict[str, Any], field: str, *, least: int) -> int:
    value = flat.get(field)
    if type(value) is not int or value < least:
        raise CheckpointError(f"{field} must be an integer of at least {least}, got {value!r}")
    return value
