"""Sequential Temperature Scaling: confidences that mean what they say, left to right (paper 3.2.1).

A temperature cannot move a confidence across one half; where drafts are judged more strictly than they were trained to
be, a shift of the log-odds at each position can (Platt, 1999), and keeps the order of drafts as a temperature does.
Fits and applies; where the validation drafts come from is not its business. Letters: S validation drafts, K positions.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dspark_ray.errors import ConfigError

STS_KIND = "sequential_temperature_scaling"
_BINS = 15
_MAX_SHIFT = 12.0
_BISECTIONS = 40


@dataclass(frozen=True, slots=True)
class SequentialTemperatureScaling:
    """One temperature a draft position, perhaps a shift, and the record of how they were fitted."""

    temperatures: tuple[float, ...]  # K
    num_samples: int = 0
    ece_before: tuple[float, ...] = ()  # K, of the cumulative product at each position
    ece_after: tuple[float, ...] = ()  # K
    provenance: Mapping[str, str] = field(default_factory=dict)  # data, model, drafter, versions
    shifts: tuple[float, ...] = ()  # K, added to the scaled logits; empty: the paper's, none

    def __post_init__(self) -> None:
        positive = bool(self.temperatures) and all(np.isfinite(t) and t > 0 for t in self.temperatures)
        _require(positive, "temperatures", "one or more positive numbers", self.temperatures)
        for name in ("ece_before", "ece_after", "shifts"):
            values = getattr(self, name)
            fits = (not values or len(values) == len(self.temperatures)) and bool(np.isfinite(values).all())
            _require(fits, name, f"{len(self.temperatures)} numbers, one a temperature, or empty", values)

    @classmethod
    def identity(cls, num_draft_tokens: int) -> "SequentialTemperatureScaling":
        """No calibration: confidences stay as they are."""
        return cls((1.0,) * num_draft_tokens, provenance={"data": "none (identity)"})

    def apply(self, confidence_logits: np.ndarray | torch.Tensor) -> np.ndarray:
        """Calibrated conditional confidences from logits [..., k] with k <= K; float32 of the same shape."""
        logits = _array(confidence_logits)
        return self._calibrated(logits)

    def apply_confidences(self, confidences: np.ndarray | torch.Tensor) -> np.ndarray:
        """The same from probabilities [..., k]; 0, 1 and NaN stay what they are."""
        values = _array(confidences)
        with np.errstate(divide="ignore"):
            logits = np.log(values) - np.log1p(-values)
        return self._calibrated(logits)

    def _calibrated(self, logits: np.ndarray) -> np.ndarray:
        width = logits.shape[-1]
        if width > len(self.temperatures):
            raise ConfigError(
                f"calibration covers {len(self.temperatures)} draft positions but the drafter proposes {width}; "
                "fit it again for this drafter"
            )
        scaled = logits / np.asarray(self.temperatures[:width])
        return _sigmoid(scaled + np.asarray(self.shifts[:width]) if self.shifts else scaled).astype(np.float32)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "temperatures": list(self.temperatures),
            "shifts": list(self.shifts),
            "num_samples": self.num_samples,
            "ece_before": list(self.ece_before),
            "ece_after": list(self.ece_after),
            "provenance": dict(self.provenance),
        }

    def to_json(self) -> str:
        return json.dumps({"kind": STS_KIND, **self.to_dict()}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> "SequentialTemperatureScaling":
        """Raises ConfigError naming the field that is missing or wrong."""
        return cls.from_dict(_parsed(text))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "SequentialTemperatureScaling":
        """Raises ConfigError naming the field that is missing or wrong."""
        count = data.get("num_samples", 0)
        _require(isinstance(count, int) and not isinstance(count, bool), "num_samples", "an integer", count)
        provenance = data.get("provenance", {})
        _require(isinstance(provenance, dict), "provenance", "an object", provenance)
        return cls(
            _numbers("temperatures", data.get("temperatures")),
            count,
            _numbers("ece_before", data.get("ece_before", [])),
            _numbers("ece_after", data.get("ece_after", [])),
            {key: str(value) for key, value in provenance.items()},
            _numbers("shifts", data.get("shifts", [])),
        )

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "SequentialTemperatureScaling":
        """Raises ConfigError naming the file and the field."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"calibration {path} cannot be read: {error}") from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error


def fit_sts(
    confidence_logits: np.ndarray | torch.Tensor,  # [S, K]
    accepted: np.ndarray | torch.Tensor,  # [S] accepted drafts of each block, or [S, K] whether each position was
    grid: np.ndarray | None = None,
    provenance: Mapping[str, str] | None = None,
    *,
    shifted: bool = False,
) -> SequentialTemperatureScaling:
    """Fit one temperature a position, left to right, each minimising the ECE of the cumulative product (3.2.1).

    The drafts must have been verified in full: lengths that a scheduler chose would hide the rejections it avoided.
    Args: shifted: give every temperature the shift that makes the mean of the product what was observed.
    """
    logits = _array(confidence_logits)
    survived = _prefix_accepted(_array(accepted), logits.shape[1])
    if len(logits) == 0 or len(survived) != len(logits):
        raise ValueError(
            f"expected one acceptance for each of {len(logits)} drafts (at least one), got {len(survived)}"
        )
    candidates = np.geomspace(0.125, 8.0, 97) if grid is None else np.asarray(grid, dtype=np.float64)
    # Nearest to 1 first: where several temperatures are equally good, change least.
    candidates = candidates[np.argsort(np.abs(np.log(candidates)), kind="stable")]
    fits: list[_PositionFit] = []
    fixed = np.ones(len(logits))
    for position in range(logits.shape[1]):
        best = min(
            (_fit_position(logits[:, position], fixed, survived[:, position], t, shifted) for t in candidates),
            key=lambda fit: fit.error,
        )
        fits.append(best)
        fixed = best.product
    raw = np.cumprod(_sigmoid(logits), axis=1)
    ece_before = tuple(expected_calibration_error(raw[:, k], survived[:, k]) for k in range(logits.shape[1]))
    return SequentialTemperatureScaling(
        tuple(fit.temperature for fit in fits),
        len(logits),
        ece_before,
        tuple(fit.error for fit in fits),
        dict(provenance or {}),
        tuple(fit.shift for fit in fits) if shifted else (),
    )


@dataclass(frozen=True, slots=True)
class _PositionFit:
    temperature: float
    shift: float
    product: np.ndarray  # [S] predicted survival up to and with this position
    error: float


def _fit_position(
    logits: np.ndarray, fixed: np.ndarray, survived: np.ndarray, temperature: float, shifted: bool
) -> _PositionFit:
    scaled = logits / temperature
    shift = _balancing_shift(scaled, fixed, float(survived.sum())) if shifted else 0.0
    product = fixed * _sigmoid(scaled + shift)
    return _PositionFit(float(temperature), shift, product, expected_calibration_error(product, survived))


def _balancing_shift(scaled: np.ndarray, fixed: np.ndarray, num_survived: float) -> float:
    """The shift at which as many drafts are predicted to survive as did; by bisection, the sum being monotone."""
    low, high = -_MAX_SHIFT, _MAX_SHIFT
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if float((fixed * _sigmoid(scaled + middle)).sum()) < num_survived:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def expected_calibration_error(predicted: np.ndarray, observed: np.ndarray, bins: int = _BINS) -> float:
    """Mean gap between predicted and observed rate over equal bins, weighted by count (Naeini et al., 2015).

    Args: predicted [S] in [0, 1]; observed [S] bool or 0/1.
    """
    predicted = np.asarray(predicted, dtype=np.float64)
    bucket = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    # The gap of a bin times its count is |sum of predictions - sum of events|.
    gaps = np.bincount(bucket, weights=predicted - np.asarray(observed, dtype=np.float64), minlength=bins)
    return float(np.abs(gaps).sum() / len(predicted))


def _prefix_accepted(accepted: np.ndarray, num_positions: int) -> np.ndarray:
    """[S, K] whether the whole prefix was accepted; what looks accepted after a rejection is not."""
    if accepted.ndim == 1:
        return np.arange(num_positions) < accepted[:, None]
    return np.cumprod(accepted.astype(bool), axis=1).astype(bool)


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * logits))


def _array(values: np.ndarray | torch.Tensor) -> np.ndarray:
    array = values.detach().float().cpu().numpy() if isinstance(values, torch.Tensor) else values
    return np.asarray(array, dtype=np.float64)


def _parsed(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"calibration: not JSON ({error})") from error
    _require(isinstance(data, dict), "top level", "an object", data)
    _require(data.get("kind") == STS_KIND, "kind", f'"{STS_KIND}"', data.get("kind"))
    return data


def _numbers(name: str, values: object) -> tuple[float, ...]:
    if not isinstance(values, list) or any(isinstance(v, bool) or not isinstance(v, int | float) for v in values):
        raise ConfigError(f"calibration: field {name} must be a list of numbers, got {values!r}")
    return tuple(float(v) for v in values)


def _require(condition: bool, name: str, expected: str, got: object) -> None:
    if not condition:
        raise ConfigError(f"calibration: field {name} must be {expected}, got {got!r}")
