"""The target: any Hugging Face causal LM, run packed over paged K/V with taps on chosen layers.

Knows nothing of requests, sampling or drafters. transformers loads and shards the weights; the attention function
registered here reads and writes the pages (DESIGN: section 6). Letters: T packed tokens, n rows that need logits,
V vocabulary, d hidden size, m tapped layers.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PretrainedConfig

from dspark_ray.errors import CheckpointError, ConfigError, UnsupportedModelError
from dspark_ray.models.attention import AttentionBatch, KVCache, active_context, attention_context, paged_attention
from dspark_ray.models.row_invariance import make_row_invariant

logger = logging.getLogger(__name__)

ATTENTION_NAME = "dspark_paged"
EMBEDDING_LAYER = -1  # DeepSpec's id for the embedding output in target_layer_ids


def paged_attention_forward(
    module: nn.Module,
    query: torch.Tensor,  # [1, H, T, D]
    key: torch.Tensor,  # [1, G, T, D]
    value: torch.Tensor,  # [1, G, T, D]
    attention_mask: torch.Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface over pages: store this step's K/V, then attend. Returns [1, T, H, D]."""
    context = active_context()
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    context.cache.write(layer, context.batch.write_slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    out = paged_attention(query[0].transpose(0, 1), context.cache, layer, context.batch, scaling)
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """Logits of the chosen rows and the tapped hidden states of all tokens, concatenated in layer order."""

    logits: torch.Tensor  # [n, V]
    taps: torch.Tensor | None  # [T, m * d]


class TargetModel:
    """A loaded causal LM. `load` raises UnsupportedModelError naming what this attention cannot do."""

    def __init__(
        self, model: Any, folder: str, dtype: torch.dtype, device: torch.device, row_invariant: bool = False
    ) -> None:
        self._model = model
        self._decoder = model.get_decoder()
        self.config: PretrainedConfig = model.config.get_text_config()
        self.folder, self.dtype, self.device = folder, dtype, device
        self.row_invariant = row_invariant  # known to be: a token's logits do not depend on what else is in its step
        self._taps: dict[int, torch.Tensor] = {}
        self._tapped: tuple[int, ...] = ()

    @classmethod
    def load(
        cls,
        folder: str,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        tp_size: int = 1,
        row_invariant: bool = False,
    ) -> "TargetModel":
        """Load a model folder. With tp_size > 1 torch.distributed must be initialised; weights are sharded by
        transformers' own plan over gloo (CPU) or NCCL (CUDA). `row_invariant` (bfloat16 on CPU, one rank): a token's
        logits do not depend on what else is in its step; elsewhere it has no effect."""
        device = torch.device(device)
        config = read_config(folder)
        check_supported(config, tp_size)
        kwargs: dict[str, Any] = {"dtype": dtype, "attn_implementation": ATTENTION_NAME}
        if tp_size > 1:
            kwargs["distributed_config"] = transformers.distributed.DistributedConfig(tp_plan="auto", tp_size=tp_size)
        with torch.device("cpu"):
            model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **kwargs)
        if tp_size == 1:
            model = model.to(device)  # type: ignore[arg-type]
        wanted = row_invariant and tp_size == 1 and dtype == torch.bfloat16 and device.type == "cpu"
        return cls(model.eval(), folder, dtype, device, wanted and make_row_invariant(model))

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def max_positions(self) -> int:
        return int(self.config.max_position_embeddings)

    def kv_bytes_per_token(self, tp_size: int = 1) -> int:
        heads, head_dim = kv_shape(self.config)
        return 2 * self.num_layers * (heads // tp_size) * head_dim * self.dtype.itemsize

    def allocate(self, num_pages: int, page_size: int, tp_size: int = 1) -> KVCache:
        heads, head_dim = kv_shape(self.config)
        return KVCache(self.num_layers, num_pages * page_size, heads // tp_size, head_dim, self.dtype, self.device)

    def tap(self, layers: tuple[int, ...]) -> None:
        """Choose the layers whose outputs `forward` returns; id i is decoder layer i, -1 the embeddings."""
        if self._tapped:
            raise ConfigError("the taps of a target model are chosen once")
        for layer in layers:
            if not EMBEDDING_LAYER <= layer < self.num_layers:
                raise CheckpointError(
                    f"target_layer_ids contains {layer}, but the target has layers 0..{self.num_layers - 1} "
                    "(-1: embeddings)"
                )
            module = self._decoder.embed_tokens if layer == EMBEDDING_LAYER else self._decoder.layers[layer]
            module.register_forward_hook(self._hook(layer))
        self._tapped = tuple(layers)

    def _hook(self, layer: int) -> Any:
        def store(module: nn.Module, inputs: Any, output: Any) -> None:
            self._taps[layer] = output[0] if isinstance(output, tuple) else output

        return store

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,  # [T] int64
        positions: torch.Tensor,  # [T] int64
        cache: KVCache,
        batch: AttentionBatch,
        logit_rows: torch.Tensor,  # [n] int64, packed indices
    ) -> TargetOutput:
        """One packed forward pass; K/V of all tokens are written to the pages."""
        with attention_context(cache, batch):
            out = self._model(
                input_ids=token_ids[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=logit_rows,
            )
        return TargetOutput(out.logits[0], self._collect_taps())

    @torch.inference_mode()
    def hidden_states(
        self,
        token_ids: torch.Tensor,  # [T] int64
        positions: torch.Tensor,  # [T] int64
        cache: KVCache,
        batch: AttentionBatch,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # [T, d], [T, m * d]
        """Last hidden states, after the final norm, and taps of all tokens; no logits."""
        with attention_context(cache, batch):
            out = self._decoder(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        return out.last_hidden_state[0], self._collect_taps()

    @property
    def head_weight(self) -> torch.Tensor:  # [V, d]
        weight = self._model.get_output_embeddings().weight
        assert isinstance(weight, torch.Tensor)
        return weight

    def _collect_taps(self) -> torch.Tensor | None:
        if not self._tapped:
            return None
        taps = torch.cat([self._taps[layer][0] for layer in self._tapped], dim=-1)
        self._taps.clear()
        return taps


def read_config(folder: str) -> PretrainedConfig:
    if not (Path(folder) / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json: expected the folder of a Hugging Face model")
    return AutoConfig.from_pretrained(folder, local_files_only=True)


def kv_shape(config: PretrainedConfig) -> tuple[int, int]:
    """(number of key/value heads, head size)."""
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    return heads, head_dim


def check_supported(config: PretrainedConfig, tp_size: int = 1) -> None:
    """Raise UnsupportedModelError if the paged attention cannot run this model exactly."""
    text = config.get_text_config()
    name = getattr(config, "model_type", "unknown")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; expected a decoder-only causal LM")
    if getattr(text, "attn_logit_softcapping", None):
        raise UnsupportedModelError(f"{name} soft-caps attention logits (attn_logit_softcapping), which SDPA cannot do")
    layer_types = set(getattr(text, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"}:
        other = sorted(layer_types - {"full_attention"})
        raise UnsupportedModelError(f"{name} has layers of type {other}; only full_attention is supported")
    sliding = getattr(text, "sliding_window", None)
    if sliding and getattr(text, "use_sliding_window", True) and not getattr(text, "layer_types", None):
        raise UnsupportedModelError(
            f"{name} uses a sliding window of {sliding} tokens; only full attention is supported"
        )
    if name == "gpt_oss":
        raise UnsupportedModelError("gpt_oss uses attention sinks, which the paged attention does not have")
    heads, _ = kv_shape(text)
    if heads % tp_size or int(text.num_attention_heads) % tp_size:
        raise ConfigError(
            f"tensor_parallel_size {tp_size} does not divide the {text.num_attention_heads} query and {heads} "
            f"key/value heads of {name}"
        )


def resolve_dtype(name: str, device: torch.device, config: PretrainedConfig | None = None) -> torch.dtype:
    """`auto`: the checkpoint's type on CUDA; on CPU bfloat16 where the processor multiplies it, else float32."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        return getattr(config, "dtype", None) or torch.bfloat16
    capabilities = torch.cpu.get_capabilities()
    native = any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return torch.bfloat16 if native else torch.float32


def resolve_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one. The first visible GPU: whoever places a process shows it its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda' but torch sees no CUDA device; set device to 'cpu' or 'auto'")
    return torch.device(name, 0) if name == "cuda" else torch.device(name)
