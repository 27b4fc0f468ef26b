"""A draft: the tokens a drafter proposes with a confidence for each (paper 3.1, 3.2.1).

Plain numpy so that it travels between processes as it is and every rank plans from the same bytes.
Letters: R requests, K draft positions, k support of the truncated draft distribution.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class DraftProposal:
    """One request's draft block after its anchor token."""

    tokens: np.ndarray  # [K] int64
    confidences: np.ndarray  # [K] float32, c_k of equation 7 after calibration
    q_ids: np.ndarray | None = None  # [K, k] int64, support of the distribution each token was drawn from
    q_probs: np.ndarray | None = None  # [K, k] float32, its probabilities; None when greedy or coupled

    @property
    def survival(self) -> np.ndarray:  # [K] float32
        return survival(self.confidences)


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """Drafts of several requests, as one message from a drafter to every target rank.

    `anchor_positions` says which anchor each draft continues: a draft for another anchor is stale and ignored.
    """

    request_ids: tuple[str, ...]  # R
    anchor_positions: np.ndarray  # [R] int64, position of x_0 in its sequence
    num_drafts: np.ndarray  # [R] int64, valid positions of each row (0..K)
    tokens: np.ndarray  # [R, K] int64
    confidences: np.ndarray  # [R, K] float32
    q_ids: np.ndarray | None = None  # [R, K, k] int64
    q_probs: np.ndarray | None = None  # [R, K, k] float32
    draft_seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.request_ids)

    @property
    def survival(self) -> np.ndarray:  # [R, K] float32, zero past num_drafts
        positions = np.arange(self.confidences.shape[1])
        return np.where(positions[None, :] < self.num_drafts[:, None], survival(self.confidences), 0.0).astype(
            np.float32
        )

    def proposal(self, row: int) -> DraftProposal:
        count = int(self.num_drafts[row])
        return DraftProposal(
            self.tokens[row, :count],
            self.confidences[row, :count],
            None if self.q_ids is None else self.q_ids[row, :count],
            None if self.q_probs is None else self.q_probs[row, :count],
        )


def survival(confidences: np.ndarray) -> np.ndarray:
    """Cumulative product a_k = c_1 ... c_k (Algorithm 1, line 2); NaN counts as 0, values are clipped to [0, 1].

    Args and result: [..., K] float32. The result never rises along a block.
    """
    clean = np.clip(np.nan_to_num(np.asarray(confidences, dtype=np.float32), nan=0.0), 0.0, 1.0)
    return np.cumprod(clean, axis=-1, dtype=np.float32)
