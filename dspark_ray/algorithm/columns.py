"""Sampling parameters of a batch as columns, so that a step handles requests in vectors.

Letters: R requests.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """One entry a request. `noise_seeds` is the client's seed, or a random one drawn once for the request."""

    temperature: np.ndarray  # [R] float32, 0 = greedy
    top_k: np.ndarray  # [R] int64, 0 = off
    top_p: np.ndarray  # [R] float32, 1 = off
    min_p: np.ndarray  # [R] float32, 0 = off
    noise_seeds: np.ndarray  # [R] int64
    coupled: np.ndarray  # [R] bool, shared Gumbel noise instead of rejection sampling

    def __len__(self) -> int:
        return len(self.temperature)

    @property
    def greedy(self) -> np.ndarray:  # [R] bool
        return self.temperature == 0.0

    def select(self, rows: np.ndarray) -> "SamplingColumns":
        """The given rows (indices or a mask), in that order; indices may repeat."""
        return SamplingColumns(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.noise_seeds[rows],
            self.coupled[rows],
        )
