"""Which blocks of a sequence are trained, and what each of their positions must predict. Pure functions, no model.

A block at anchor p sees features of positions < p, holds the anchor token and masks at p .. p + gamma - 1, and its
draft k (1 .. K) predicts token p + k from x_{p+k-1}; the target predicts the same token from its hidden state at
p + k - 1. Letters: R sequences, S padded length, A anchors a sequence, K draft positions.
"""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class AnchorBlocks:
    """Anchors of each sequence; rows with fewer than A of them are filled with position 1 and `keep` False."""

    positions: torch.Tensor  # [R, A] int64
    keep: torch.Tensor  # [R, A] bool

    def to(self, device: torch.device) -> "AnchorBlocks":
        return AnchorBlocks(self.positions.to(device), self.keep.to(device))


@dataclass(frozen=True, slots=True)
class Supervision:
    """The supervised draft positions of a batch, teacher-forced. All indices are into padded [R, S] arrays."""

    mask: torch.Tensor  # [R, A, K] bool, the predicted token exists
    previous: torch.Tensor  # [R, A, K] int64, place of x_{k-1} (0 where not supervised)
    target: torch.Tensor  # [R, A, K] int64, place of the token to predict


def sample_anchors(
    rng: np.random.Generator, reply_starts: np.ndarray, lengths: np.ndarray, anchors_per_sequence: int
) -> AnchorBlocks:
    """Anchors without replacement, uniform over the positions reply_start - 1 .. length - 2, sorted.

    The first of them is the last prompt token: what follows it is the target's own text already. Position 0 is left
    out, since nothing lies before it. Args: reply_starts, lengths [R] int64.
    """
    firsts = np.maximum(reply_starts - 1, 1)
    counts = np.clip(lengths - 1 - firsts, 0, anchors_per_sequence)
    positions = np.ones((len(lengths), max(1, int(counts.max(initial=0)))), dtype=np.int64)
    keep = np.arange(positions.shape[1]) < counts[:, None]
    for row, (first, length, count) in enumerate(zip(firsts, lengths, counts, strict=True)):
        positions[row, :count] = np.sort(rng.permutation(length - 1 - first)[:count]) + first
    return AnchorBlocks(torch.from_numpy(positions), torch.from_numpy(keep))


def supervise(blocks: AnchorBlocks, lengths: torch.Tensor, num_draft_tokens: int) -> Supervision:
    """What draft k of each block must predict. Args: lengths [R] int64."""
    offsets = torch.arange(num_draft_tokens, device=blocks.positions.device)
    previous = blocks.positions[:, :, None] + offsets
    mask = blocks.keep[:, :, None] & (previous + 1 < lengths[:, None, None])
    previous = torch.where(mask, previous, 0)
    return Supervision(mask, previous, previous + 1)


def position_weights(num_draft_tokens: int, decay: float) -> torch.Tensor:  # [K]
    """exp(-(k - 1) / gamma) for k = 1 .. K: later drafts are reached less often (paper 3.3)."""
    return torch.exp(-torch.arange(num_draft_tokens) / decay)
