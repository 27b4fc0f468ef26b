"""The draft network over many anchors at once: what inference computes block by block, teacher-forced, with gradients.

Attention has two parts under one softmax: scores over the sequence's context, masked to positions before the block's
anchor, and scores within the block. Blocks never see each other, so cost grows with the anchors and not with their
square. Letters: R sequences, S padded length, A anchors, G gamma, Q queries and B keys of a block, H query heads, D
head size, d hidden size.
"""

import torch
from torch import nn

from dspark_ray.models.draft_model import DraftAttention, DraftLayer, DSparkDraftModel, rotate_heads
from dspark_ray.training.anchors import AnchorBlocks

Rotation = tuple[torch.Tensor, torch.Tensor]  # cos, sin [..., D]


def draft_hidden(
    model: DSparkDraftModel,
    taps: torch.Tensor,  # [R, S, m * d]
    token_ids: torch.Tensor,  # [R, S] int64
    blocks: AnchorBlocks,
) -> torch.Tensor:  # [R, A, G, d] after the final norm
    """Hidden states of every block. The same numbers as `append_context` and `forward_block` (equations 2 and 3)."""
    rows, length = token_ids.shape
    device = taps.device
    context = model.project(taps)
    positions = (blocks.positions[:, :, None] + torch.arange(model.config.block_size, device=device)).flatten(
        1
    )  # [R, A * G]
    context_rotation = model.rotary_emb(context, torch.arange(length, device=device)[None])
    block_rotation = model.rotary_emb(context, positions)
    unseen = torch.arange(length, device=device) >= blocks.positions[:, :, None]  # [R, A, S]
    hidden = model.embed_tokens(_block_tokens(model, token_ids, blocks)).flatten(1, 2)  # [R, A * G, d]
    for layer in model.layers:
        assert isinstance(layer, DraftLayer)
        hidden = _layer(layer, hidden, context, context_rotation, block_rotation, unseen)
    return model.norm(hidden).view(rows, -1, model.config.block_size, hidden.shape[-1])


def _block_tokens(model: DSparkDraftModel, token_ids: torch.Tensor, blocks: AnchorBlocks) -> torch.Tensor:
    assert model.config.mask_token_id is not None
    tokens = blocks.positions.new_full((*blocks.positions.shape, model.config.block_size), model.config.mask_token_id)
    tokens[:, :, 0] = token_ids.gather(1, blocks.positions)
    return tokens


def _layer(
    layer: DraftLayer,
    hidden: torch.Tensor,  # [R, A * G, d]
    context: torch.Tensor,  # [R, S, d]
    context_rotation: Rotation,
    block_rotation: Rotation,
    unseen: torch.Tensor,
) -> torch.Tensor:
    attention = layer.self_attn
    normed = layer.input_layernorm(hidden)
    query = rotate_heads(attention.q_norm(split_heads(attention, attention.q_proj, normed)), block_rotation)
    context_kv = keys_values(attention, context, context_rotation)
    block_kv = keys_values(attention, normed, block_rotation)
    attended = two_part_attention(query * attention.scaling, context_kv, block_kv, unseen)
    hidden = hidden + attention.o_proj(attended.flatten(2))
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


def split_heads(attention: DraftAttention, projection: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return projection(hidden).unflatten(-1, (-1, attention.head_dim))  # [R, T, heads, D]


def keys_values(
    attention: DraftAttention, hidden: torch.Tensor, rotation: Rotation
) -> tuple[torch.Tensor, torch.Tensor]:  # [R, T, G', D] each
    keys = rotate_heads(attention.k_norm(split_heads(attention, attention.k_proj, hidden)), rotation)
    return keys, split_heads(attention, attention.v_proj, hidden)


def two_part_attention(
    query: torch.Tensor,  # [R, A * Q, H, D], scaled
    context_kv: tuple[torch.Tensor, torch.Tensor],  # [R, S, G', D] each
    block_kv: tuple[torch.Tensor, torch.Tensor],  # [R, A * B, G', D] each
    unseen: torch.Tensor,  # [R, A, S] bool, context that a block must not see
) -> torch.Tensor:  # [R, A * Q, H, D]
    """softmax([Q K_ctx^T ; Q K_blk^T]) [V_ctx ; V_blk] with the mask of one block at a time: all of its Q queries see
    all of its B keys."""
    rows, num_queries, heads, head_dim = query.shape
    context_keys, context_values, block_keys, block_values = (
        _repeat(tensor, heads).transpose(1, 2).to(query.dtype) for tensor in (*context_kv, *block_kv)
    )  # [R, H, S or A * B, D]
    query = query.transpose(1, 2)
    num_blocks = unseen.shape[1]
    in_blocks = (rows, heads, num_blocks, num_queries // num_blocks, head_dim)
    keys_in_blocks = (rows, heads, num_blocks, block_keys.shape[2] // num_blocks, head_dim)
    context_scores = (query @ context_keys.transpose(-1, -2)).view(*in_blocks[:4], -1)
    context_scores = context_scores.masked_fill(unseen[:, None, :, None, :], float("-inf"))
    block_scores = query.reshape(in_blocks) @ block_keys.reshape(keys_in_blocks).transpose(-1, -2)
    weights = torch.cat([context_scores, block_scores], dim=-1).softmax(-1, dtype=torch.float32).to(query.dtype)
    context_weights, block_weights = weights.split([context_keys.shape[2], keys_in_blocks[3]], dim=-1)
    attended = context_weights.flatten(2, 3) @ context_values
    attended = attended.view(in_blocks) + block_weights @ block_values.reshape(keys_in_blocks)
    return attended.flatten(2, 3).transpose(1, 2)


def _repeat(heads: torch.Tensor, num_heads: int) -> torch.Tensor:  # [R, T, G', D] -> [R, T, H, D]
    return heads.repeat_interleave(num_heads // heads.shape[2], dim=2) if heads.shape[2] != num_heads else heads
