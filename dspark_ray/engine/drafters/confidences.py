"""From scores to the confidences that travel with drafts: calibration, and the score of drafters without a head.

Letters: R requests, K draft positions.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from dspark_ray.algorithm.columns import SamplingColumns
from dspark_ray.algorithm.sampling import DraftSample


class Calibration(Protocol):
    """Maps confidence logits [R, K] to calibrated conditionals c_k, given how each row is sampled (paper 3.2.1)."""

    def apply(self, confidence_logits: np.ndarray, columns: SamplingColumns) -> np.ndarray: ...


def top_probability_logits(samples: Sequence[DraftSample]) -> torch.Tensor:  # K samples of [R] -> [R, K]
    """Logits of max_v q_k(v), which like a confidence head sees x_<k but never x_k, so that admission by it stays exact
    (Appendix A)."""
    return torch.logit(torch.stack([sample.top_prob for sample in samples], dim=1).float(), eps=1e-6)


def calibrated(
    logits: torch.Tensor,  # [R, K]
    calibration: Calibration | None,
    columns: SamplingColumns,
) -> np.ndarray:  # [R, K]
    if calibration is not None:
        return calibration.apply(logits.cpu().numpy(), columns)
    return torch.sigmoid(logits).cpu().numpy()
