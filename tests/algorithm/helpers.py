"""Columns, fixed distributions and goodness of fit, shared by the tests of the algorithm floor."""

import numpy as np
import torch
from scipy.stats import chisquare

from dspark_ray.algorithm.columns import SamplingColumns

LEAST_P_VALUE = 1e-4


def make_columns(
    rows: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seeds: np.ndarray | None = None,
    coupled: bool = False,
) -> SamplingColumns:
    return SamplingColumns(
        temperature=np.full(rows, temperature, dtype=np.float32),
        top_k=np.full(rows, top_k, dtype=np.int64),
        top_p=np.full(rows, top_p, dtype=np.float32),
        min_p=np.full(rows, min_p, dtype=np.float32),
        noise_seeds=np.arange(rows, dtype=np.int64) if seeds is None else seeds.astype(np.int64),
        coupled=np.full(rows, coupled),
    )


def concat_columns(*parts: SamplingColumns) -> SamplingColumns:
    names = ("temperature", "top_k", "top_p", "min_p", "noise_seeds", "coupled")
    return SamplingColumns(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def random_distributions(rows: int, vocabulary: int, seed: int, sharpness: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (sharpness * torch.randn(rows, vocabulary, generator=generator)).softmax(-1)


def p_value(tokens: np.ndarray, probabilities: np.ndarray) -> float:
    """Chi-square p-value of observed tokens against probabilities; cells that cannot occur must be empty."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    probabilities = np.asarray(probabilities, dtype=np.float64)
    possible = probabilities > 0
    assert counts[~possible].sum() == 0, "a token of probability 0 was emitted"
    expected = probabilities[possible] / probabilities[possible].sum() * len(tokens)
    return float(chisquare(counts[possible], expected).pvalue)
