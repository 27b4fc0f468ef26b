"""The draft network: a DFlash backbone over cached target features, with DSpark's heads on top (paper 2.2 and 3.1).

Knows nothing of requests, sampling or checkpoint files. Parameter names are DeepSpec's tensor names. Letters:
N context tokens, R block rows, gamma block positions, T packed block tokens (R * gamma), K draft positions, H query
heads, G key/value heads, D head size, V draft vocabulary, d hidden size, m tapped target layers.
"""

import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding, rotate_half

from dspark_ray.models.attention import AttentionBatch, KVCache, paged_attention
from dspark_ray.models.draft_config import DraftConfig
from dspark_ray.models.heads import ConfidenceHead, MarkovHead

Rotation = tuple[torch.Tensor, torch.Tensor]  # cos, sin [..., T, D]


class FeatureProjection(nn.Module):
    """Equation 2: H_ctx = RMSNorm(W_c [H^(l1); ...; H^(lm)]). Runs beside the target: d numbers a token travel."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        num_taps = len(config.target_layer_ids)
        self.fc = nn.Linear(num_taps * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, config.transformer.rms_norm_eps)

    def forward(self, taps: torch.Tensor) -> torch.Tensor:  # [N, m * d] -> [N, d]
        return project_features(self.fc, self.hidden_norm, taps)


def project_features(fc: nn.Linear, norm: nn.Module, taps: torch.Tensor) -> torch.Tensor:
    return norm(fc(taps.to(fc.weight.dtype)))


class DraftAttention(nn.Module):
    """Equation 3: block queries over cached context K/V and the block's own, all from the same projections."""

    def __init__(self, config: DraftConfig, layer: int, input_size: int | None = None) -> None:
        """`input_size`: of what is projected to queries, keys and values; default: the hidden size."""
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.scaling = config.head_dim**-0.5
        inner, input_size = config.transformer, input_size or config.hidden_size
        query_size, kv_size = inner.num_attention_heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(input_size, query_size, bias=inner.attention_bias)
        self.k_proj = nn.Linear(input_size, kv_size, bias=inner.attention_bias)
        self.v_proj = nn.Linear(input_size, kv_size, bias=inner.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=inner.attention_bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, inner.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, inner.rms_norm_eps)

    def write(self, hidden: torch.Tensor, rotation: Rotation, slots: torch.Tensor, cache: KVCache) -> None:
        """Store K/V of hidden [T, d] (context features or normed block states) at slots [T]."""
        key = rotate_heads(self.k_norm(self._heads(self.k_proj(hidden))), rotation)
        cache.write(self.layer, slots, key, self._heads(self.v_proj(hidden)))

    def forward(self, hidden: torch.Tensor, rotation: Rotation, batch: AttentionBatch, cache: KVCache) -> torch.Tensor:
        self.write(hidden, rotation, batch.write_slots, cache)
        query = rotate_heads(self.q_norm(self._heads(self.q_proj(hidden))), rotation)
        return self.o_proj(paged_attention(query, cache, self.layer, batch, self.scaling).flatten(1))

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:  # [T, heads * D] -> [T, heads, D]
        return projected.unflatten(-1, (-1, self.head_dim))


def rotate_heads(heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:  # [..., T, heads, D]
    cos, sin = rotation
    return heads * cos[..., None, :] + rotate_half(heads) * sin[..., None, :]


class DraftLayer(nn.Module):
    """A pre-norm Qwen3 layer whose context enters through K/V only."""

    def __init__(self, config: DraftConfig, layer: int) -> None:
        super().__init__()
        eps = config.transformer.rms_norm_eps
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps)
        self.self_attn = DraftAttention(config, layer)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps)
        self.mlp = Qwen3MLP(config.transformer)

    def write_context(self, context: torch.Tensor, rotation: Rotation, slots: torch.Tensor, cache: KVCache) -> None:
        """Features enter as they are: hidden_norm, not this layer's input norm, has normed them (equation 2)."""
        self.self_attn.write(context, rotation, slots, cache)

    def forward(self, hidden: torch.Tensor, rotation: Rotation, batch: AttentionBatch, cache: KVCache) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, batch, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DSparkDraftModel(nn.Module):
    """Backbone, heads and vocabulary map. DFlash is the case without Markov and confidence head.

    Do not call `.to(dtype)` after construction: RoPE frequencies are float32 buffers. `load_draft_model` sets dtypes.
    """

    draft_to_target: torch.Tensor | None

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        inner = config.transformer
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, inner.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config, layer) for layer in range(config.num_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, inner.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.markov_head = _markov_head(config)
        self.confidence_head = _confidence_head(config)
        self.rotary_emb = Qwen3RotaryEmbedding(inner)
        self.register_buffer("draft_to_target", None, persistent=False)  # [V] int64, target id of each draft id

    def project(self, taps: torch.Tensor) -> torch.Tensor:  # [N, m * d] -> [N, d]
        """Equation 2."""
        return project_features(self.fc, self.hidden_norm, taps)

    def new_cache(self, num_slots: int) -> KVCache:
        return new_draft_cache(self.config, num_slots, self.norm.weight)

    def append_context(
        self,
        context: torch.Tensor,  # [N, d] H_ctx
        positions: torch.Tensor,  # [N] int64, true positions
        slots: torch.Tensor,  # [N] int64
        cache: KVCache,
    ) -> None:
        """Write the context K/V of every layer (first half of equation 3)."""
        context = context.to(self.norm.weight.dtype)
        rotation = rotation_at(self.rotary_emb, context, positions)
        for layer in self.layers:
            assert isinstance(layer, DraftLayer)
            layer.write_context(context, rotation, slots, cache)

    def forward_block(
        self,
        block_token_ids: torch.Tensor,  # [R, gamma] int64, anchor then masks
        positions: torch.Tensor,  # [R, gamma] int64
        batch: AttentionBatch,  # not causal: gamma query tokens a row, right behind the row's context
        cache: KVCache,
    ) -> torch.Tensor:  # [R, gamma, d] after the final norm
        """The parallel stage (paper 3.1); the block's own K/V is scratch that later writes overwrite."""
        hidden = self.embed_tokens(block_token_ids.reshape(-1))
        rotation = rotation_at(self.rotary_emb, hidden, positions.reshape(-1))
        for layer in self.layers:
            hidden = layer(hidden, rotation, batch, cache)
        return self.norm(hidden).view(*block_token_ids.shape, -1)

    def predictions(self, hidden: torch.Tensor, num_draft_tokens: int) -> torch.Tensor:  # [R, K, d]
        """The positions h_1 .. h_K that predict the drafts: anchor and masks (DSpark) or the masks alone (DFlash)."""
        first = self.config.first_prediction
        return hidden[:, first : first + num_draft_tokens]

    def base_logits(self, hidden: torch.Tensor) -> torch.Tensor:  # [..., d] -> [..., V]
        return self.lm_head(hidden)


def rotation_at(rotary_emb: nn.Module, hidden: torch.Tensor, positions: torch.Tensor) -> Rotation:
    """cos and sin [T, D] of packed positions [T]; dtype and device are those of hidden."""
    cos, sin = rotary_emb(hidden, positions[None])
    return cos[0], sin[0]


def new_draft_cache(config: DraftConfig, num_slots: int, like: torch.Tensor) -> KVCache:
    return KVCache(config.num_layers, num_slots, config.num_kv_heads, config.head_dim, like.dtype, like.device)


def block_tokens(anchors: torch.Tensor, config: DraftConfig) -> torch.Tensor:  # [R] -> [R, gamma]
    """Anchor followed by gamma - 1 masks (paper 3.1)."""
    assert config.mask_token_id is not None
    block = anchors.new_full((len(anchors), config.block_size), config.mask_token_id)
    block[:, 0] = anchors
    return block


def _markov_head(config: DraftConfig) -> MarkovHead | None:
    if config.markov_head_type is None:
        return None
    return MarkovHead(
        config.markov_head_type, config.vocab_size, config.draft_vocab_size, config.markov_rank, config.hidden_size
    )


def _confidence_head(config: DraftConfig) -> ConfidenceHead | None:
    if not config.has_confidence_head:
        return None
    return ConfidenceHead(config.hidden_size, config.markov_rank if config.confidence_with_markov else 0)
