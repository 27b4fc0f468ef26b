"""The autoregressive rival: one decoder layer drafts token by token from its own hidden states (as Eagle3).

The entry of token x_i is [embedding of x_i ; feature]: of context tokens and the anchor the feature is equation 2's
H_ctx at the position before, of drafted tokens the layer's own output for the token before, under the same norm. Knows
nothing of requests, sampling or checkpoint files. Letters: N context tokens, R requests, d hidden size, m tapped target
layers, V draft vocabulary.
"""

import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding

from dspark_ray.models.attention import AttentionBatch, KVCache
from dspark_ray.models.draft_config import DraftConfig
from dspark_ray.models.draft_model import (
    DraftAttention,
    DSparkDraftModel,
    Rotation,
    new_draft_cache,
    project_features,
    rotation_at,
)


class AutoregressiveLayer(nn.Module):
    """Queries, keys and values come from both halves of an entry; the residual stream carries the feature alone."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        eps = config.transformer.rms_norm_eps
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps)  # of embeddings; hidden_norm has normed features
        self.self_attn = DraftAttention(config, 0, input_size=2 * config.hidden_size)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps)
        self.mlp = Qwen3MLP(config.transformer)

    def entries(self, embeddings: torch.Tensor, features: torch.Tensor) -> torch.Tensor:  # [..., d] each -> [..., 2d]
        return torch.cat([self.input_layernorm(embeddings), features.to(embeddings.dtype)], dim=-1)

    def finish(self, features: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:  # [..., d] each -> [..., d]
        """What follows attention: the residual sums and the MLP."""
        hidden = features + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def forward(
        self,
        embeddings: torch.Tensor,
        features: torch.Tensor,
        rotation: Rotation,
        batch: AttentionBatch,
        cache: KVCache,
    ) -> torch.Tensor:
        attended = self.self_attn(self.entries(embeddings, features), rotation, batch, cache)
        return self.finish(features, attended)


class AutoregressiveDraftModel(nn.Module):
    """The layer between the target's embeddings and head. Has neither of DSpark's heads.

    Do not call `.to(dtype)` after construction: RoPE frequencies are float32 buffers.
    """

    draft_to_target: torch.Tensor | None

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        inner = config.transformer
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, inner.rms_norm_eps)
        self.layers = nn.ModuleList([AutoregressiveLayer(config)])
        self.norm = Qwen3RMSNorm(config.hidden_size, inner.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.markov_head = self.confidence_head = None
        self.rotary_emb = Qwen3RotaryEmbedding(inner)
        self.register_buffer("draft_to_target", None, persistent=False)  # [V] int64, target id of each draft id

    @property
    def layer(self) -> AutoregressiveLayer:
        layer = self.layers[0]
        assert isinstance(layer, AutoregressiveLayer)
        return layer

    def project(self, taps: torch.Tensor) -> torch.Tensor:  # [N, m * d] -> [N, d]
        """Equation 2."""
        return project_features(self.fc, self.hidden_norm, taps)

    def new_cache(self, num_slots: int) -> KVCache:
        return new_draft_cache(self.config, num_slots, self.norm.weight)

    def append_context(
        self,
        token_ids: torch.Tensor,  # [N] int64
        features: torch.Tensor,  # [N, d] H_ctx of the position before each token; zero where nothing is known of it
        positions: torch.Tensor,  # [N] int64, of the tokens
        slots: torch.Tensor,  # [N] int64
        cache: KVCache,
    ) -> None:
        """Write the K/V of known tokens: with one layer nothing else of them is ever needed."""
        entries = self.layer.entries(self.embed_tokens(token_ids), features)
        self.layer.self_attn.write(entries, rotation_at(self.rotary_emb, entries, positions), slots, cache)

    def forward_step(
        self,
        token_ids: torch.Tensor,  # [R] int64, anchors or the drafts before
        features: torch.Tensor,  # [R, d] H_ctx before the anchor, or what the step before returned
        positions: torch.Tensor,  # [R] int64, of the tokens
        batch: AttentionBatch,  # one query token a row
        cache: KVCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # [R, d] after the final norm, [R, d] features of the next step
        """One drafted token a request; the step's K/V is scratch that later writes overwrite."""
        embeddings = self.embed_tokens(token_ids)
        rotation = rotation_at(self.rotary_emb, embeddings, positions)
        hidden = self.layer(embeddings, features.to(embeddings.dtype), rotation, batch, cache)
        return self.norm(hidden), self.hidden_norm(hidden)

    def base_logits(self, hidden: torch.Tensor) -> torch.Tensor:  # [..., d] -> [..., V]
        return self.lm_head(hidden)


DraftNetwork = DSparkDraftModel | AutoregressiveDraftModel  # what a draft checkpoint holds


def build_network(config: DraftConfig) -> DraftNetwork:
    """The network of a configuration, untrained."""
    return AutoregressiveDraftModel(config) if config.autoregressive else DSparkDraftModel(config)
