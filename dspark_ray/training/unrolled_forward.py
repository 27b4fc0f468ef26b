"""Test-time training of the autoregressive drafter: over many anchors at once, gamma steps on its own outputs.

Step k sees the true features of the context before the anchor and the block's own entries 1 .. k, as at inference;
only the tokens are the sequence's. Gradients flow through all steps. Letters: R sequences, S padded length, A anchors,
H query heads, G' key/value heads, D head size, d hidden size, m tapped layers.
"""

import torch

from dspark_ray.models.autoregressive_draft import AutoregressiveDraftModel
from dspark_ray.models.draft_model import rotate_heads
from dspark_ray.training.anchors import AnchorBlocks
from dspark_ray.training.draft_forward import keys_values, split_heads, two_part_attention


def unrolled_hidden(
    model: AutoregressiveDraftModel,
    taps: torch.Tensor,  # [R, S, m * d]
    token_ids: torch.Tensor,  # [R, S] int64
    blocks: AnchorBlocks,
) -> torch.Tensor:  # [R, A, gamma, d] after the final norm
    """Hidden states of every step. The same numbers as `append_context` and `forward_step`."""
    layer, attention = model.layer, model.layer.self_attn
    before = _features_before(model.project(taps))
    context_kv = _context(model, before, token_ids)
    unseen = torch.arange(token_ids.shape[1], device=taps.device) >= blocks.positions[:, :, None]  # [R, A, S]
    feature = _gather(before, blocks.positions)  # [R, A, d]
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    outputs = []
    for k in range(model.config.block_size):
        positions = blocks.positions + k
        rotation = model.rotary_emb(feature, positions)
        embeddings = model.embed_tokens(token_ids.gather(1, positions.clamp(max=token_ids.shape[1] - 1)))
        entries = layer.entries(embeddings, feature)
        query = rotate_heads(attention.q_norm(split_heads(attention, attention.q_proj, entries)), rotation)
        for kept, new in zip((keys, values), keys_values(attention, entries, rotation), strict=True):
            kept.append(new)
        own_kv = _in_blocks(keys), _in_blocks(values)
        attended = two_part_attention(query * attention.scaling, context_kv, own_kv, unseen)
        hidden = layer.finish(feature, attention.o_proj(attended.flatten(2)))
        outputs.append(model.norm(hidden))
        feature = model.hidden_norm(hidden)
    return torch.stack(outputs, dim=2)


def _features_before(features: torch.Tensor) -> torch.Tensor:  # [R, S, d]
    """For each token the feature of the token before it; zero for the first, of which nothing is known."""
    return torch.nn.functional.pad(features[:, :-1], (0, 0, 1, 0))


def _context(
    model: AutoregressiveDraftModel, before: torch.Tensor, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:  # [R, S, G', D] each
    rotation = model.rotary_emb(before, torch.arange(token_ids.shape[1], device=before.device)[None])
    return keys_values(model.layer.self_attn, model.layer.entries(model.embed_tokens(token_ids), before), rotation)


def _gather(features: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:  # [R, S, d], [R, A] -> [R, A, d]
    return features.gather(1, positions[:, :, None].expand(-1, -1, features.shape[-1]))


def _in_blocks(steps: list[torch.Tensor]) -> torch.Tensor:  # k of [R, A, G', D] -> [R, A * k, G', D]
    return torch.stack(steps, dim=2).flatten(1, 2)
