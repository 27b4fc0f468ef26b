"""From K sampled positions to one DraftBatch: the message a drafter sends. Knows no model.

Letters: R requests, K draft positions, k support of the truncated draft distribution.
"""

from collections.abc import Sequence

import numpy as np
import torch

from dspark_ray.algorithm.columns import SamplingColumns
from dspark_ray.algorithm.proposal import DraftBatch
from dspark_ray.algorithm.sampling import DraftSample


def needs_q(columns: SamplingColumns) -> np.ndarray:  # [R] bool
    """Rows verified by rejection at a temperature: only they need the distribution their drafts came from."""
    return ~columns.greedy & ~columns.coupled


def empty_draft_batch(num_draft_tokens: int) -> DraftBatch:
    none = np.zeros(0, dtype=np.int64)
    tokens = np.zeros((0, num_draft_tokens), dtype=np.int64)
    return DraftBatch((), none, none, tokens, tokens.astype(np.float32))


def assemble(
    request_ids: tuple[str, ...],  # R
    anchor_positions: np.ndarray,  # [R]
    num_drafts: np.ndarray,  # [R]
    samples: Sequence[DraftSample],  # K
    confidences: np.ndarray,  # [R, K]
    columns: SamplingColumns,
) -> DraftBatch:
    """q travels only if some row needs it, and is zero in the rows that do not."""
    tokens = torch.stack([sample.tokens for sample in samples], dim=1).cpu().numpy()
    q_ids = q_probs = None
    rejection = needs_q(columns)
    if rejection.any():
        q_ids = torch.stack([sample.q_ids for sample in samples], dim=1).cpu().numpy() * rejection[:, None, None]
        q_probs = torch.stack([sample.q_probs for sample in samples], dim=1).cpu().numpy() * rejection[:, None, None]
    return DraftBatch(
        request_ids, anchor_positions, num_drafts, tokens, confidences.astype(np.float32), q_ids=q_ids, q_probs=q_probs
    )
