"""SPS(B), the speed of a step as a function of the tokens in it, as a measured table (paper 3.2.2 and 5.2).

The table is data: it does not know who measures, when, or what the numbers are used for.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, overload

import numpy as np

from dspark_ray.errors import ConfigError

_KIND = "cost_table"
# One step in the way of a garbage collection or another process must not bend the curve.
_OUTLIER_RATIO = 4.0
# A batch this much larger than any knot gets a knot of its own instead of bending the last one.
_NEW_KNOT_RATIO = 1.25


@dataclass(frozen=True, slots=True)
class CostTable:
    """Seconds of one step at increasing token counts; never decreasing, linear in between.

    `draft_seconds` is what drafting adds to every step. Build one with `from_measurements`.
    """

    batch_tokens: tuple[int, ...]
    step_seconds: tuple[float, ...]
    draft_seconds: float = 0.0
    provenance: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(len(self.batch_tokens) >= 2, "batch_tokens", "at least two token counts", self.batch_tokens)
        _require(
            len(self.step_seconds) == len(self.batch_tokens),
            "step_seconds",
            f"{len(self.batch_tokens)} numbers, one for each of batch_tokens",
            self.step_seconds,
        )
        increasing = all(0 < a < b for a, b in zip(self.batch_tokens, self.batch_tokens[1:], strict=False))
        _require(increasing, "batch_tokens", "positive, strictly increasing integers", self.batch_tokens)
        seconds = np.asarray(self.step_seconds, dtype=np.float64)
        usable = bool(np.isfinite(seconds).all() and (seconds > 0).all() and (np.diff(seconds) >= 0).all())
        _require(usable, "step_seconds", "positive, finite, never decreasing seconds", self.step_seconds)
        _require(0.0 <= self.draft_seconds < np.inf, "draft_seconds", "seconds, 0 or more", self.draft_seconds)

    @classmethod
    def from_measurements(
        cls,
        batch_tokens: np.ndarray | list[int],  # [n], any order, repeats allowed
        seconds: np.ndarray | list[float],  # [n]
        draft_seconds: float = 0.0,
        provenance: Mapping[str, str] | None = None,
    ) -> "CostTable":
        """The table of a profile: the median of each token count, then the nearest never-decreasing curve."""
        tokens, values = np.asarray(batch_tokens, dtype=np.int64), np.asarray(seconds, dtype=np.float64)
        if tokens.shape != values.shape or tokens.ndim != 1:
            raise ConfigError(f"cost table: {tokens.shape} token counts do not match {values.shape} measured seconds")
        knots = np.unique(tokens)
        medians = np.array([np.median(values[tokens == knot]) for knot in knots])
        return cls._of(knots, medians, draft_seconds, dict(provenance or {}))

    @classmethod
    def _of(cls, knots: np.ndarray, seconds: np.ndarray, draft: float, provenance: Mapping[str, str]) -> "CostTable":
        monotone = never_decreasing(seconds)
        return cls(tuple(int(k) for k in knots), tuple(float(s) for s in monotone), float(draft), provenance)

    @overload
    def step_seconds_at(self, batch_tokens: np.ndarray) -> np.ndarray: ...
    @overload
    def step_seconds_at(self, batch_tokens: int) -> float: ...
    def step_seconds_at(self, batch_tokens: np.ndarray | int) -> np.ndarray | float:
        """Seconds without drafting: linear between knots, the first knot below, the last slope beyond."""
        tokens = np.asarray(batch_tokens, dtype=np.float64)
        knots, seconds = self.batch_tokens, self.step_seconds
        slope = (seconds[-1] - seconds[-2]) / (knots[-1] - knots[-2])
        result = np.interp(tokens, knots, seconds) + slope * np.maximum(tokens - knots[-1], 0.0)
        return float(result) if result.ndim == 0 else result

    @overload
    def steps_per_second(self, batch_tokens: np.ndarray) -> np.ndarray: ...
    @overload
    def steps_per_second(self, batch_tokens: int) -> float: ...
    def steps_per_second(self, batch_tokens: np.ndarray | int) -> np.ndarray | float:
        """SPS(B) with drafting included; B counts tokens: 1 + verify_len of each request, and prefill tokens."""
        return 1.0 / (self.draft_seconds + self.step_seconds_at(batch_tokens))

    def refined(
        self,
        batch_tokens: np.ndarray | int,
        seconds: np.ndarray | float,
        alpha: float = 0.05,
        draft_seconds: float | None = None,
    ) -> "CostTable":
        """A new table drawn towards real steps (an exponential average of weight `alpha`), still never decreasing.

        Args: one step or several, in order: tokens in the batch, seconds without drafting, and optionally the drafting
        seconds to average in. Steps that are not finite and positive are ignored.
        """
        knots, table = np.asarray(self.batch_tokens, dtype=np.int64), np.asarray(self.step_seconds, dtype=np.float64)
        observed = zip(np.atleast_1d(batch_tokens).tolist(), np.atleast_1d(seconds).tolist(), strict=True)
        for tokens, measured in observed:
            if np.isfinite(measured) and measured > 0 and tokens > 0:
                knots, table = _drawn_towards(knots, table, int(tokens), float(measured), alpha)
        draft = self.draft_seconds
        if draft_seconds is not None and np.isfinite(draft_seconds) and draft_seconds >= 0:
            draft += alpha * (draft_seconds - draft)
        return CostTable._of(knots, table, draft, self.provenance)

    def with_draft_seconds(self, draft_seconds: float) -> "CostTable":
        return replace(self, draft_seconds=draft_seconds)

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": _KIND,
            "batch_tokens": list(self.batch_tokens),
            "step_seconds": list(self.step_seconds),
            "draft_seconds": self.draft_seconds,
            "provenance": dict(self.provenance),
        }

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "CostTable":
        """Raises ConfigError naming the field that is missing or wrong."""
        data = _parsed(text)
        knots, seconds = _numbers(data, "batch_tokens"), _numbers(data, "step_seconds")
        _require(all(float(k).is_integer() for k in knots), "batch_tokens", "integers", knots)
        draft = data.get("draft_seconds", 0.0)
        _require(isinstance(draft, int | float) and not isinstance(draft, bool), "draft_seconds", "a number", draft)
        provenance = data.get("provenance", {})
        _require(isinstance(provenance, dict), "provenance", "an object", provenance)
        return cls(
            tuple(int(k) for k in knots), tuple(seconds), float(draft), {k: str(v) for k, v in provenance.items()}
        )

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "CostTable":
        """Raises ConfigError naming the file and the field."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cost table {path} cannot be read: {error}") from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error


def cache_file_name(model: str, dtype: str, device: str, tensor_parallel_size: int, versions: Mapping[str, str]) -> str:
    """The file a table is kept under: another model, dtype, device, group size or software version, another file."""
    identity = json.dumps([model, dtype, device, tensor_parallel_size, sorted(versions.items())])
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", f"{Path(model).name}-{dtype}-{device}-tp{tensor_parallel_size}").strip(
        "-"
    )
    return f"cost-{readable}-{digest}.json"


def never_decreasing(values: np.ndarray) -> np.ndarray:
    """The nearest never-decreasing sequence in least squares (pool adjacent violators) [n].

    A running maximum would let one slow measurement lift everything after it.
    """
    means: list[float] = []
    sizes: list[int] = []
    for value in values.tolist():
        means.append(value)
        sizes.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            mean, size = means.pop(), sizes.pop()
            means[-1] = (means[-1] * sizes[-1] + mean * size) / (sizes[-1] + size)
            sizes[-1] += size
    return np.repeat(means, sizes)


def _drawn_towards(
    knots: np.ndarray, table: np.ndarray, tokens: int, measured: float, alpha: float
) -> tuple[np.ndarray, np.ndarray]:
    if tokens > knots[-1] * _NEW_KNOT_RATIO:
        return np.append(knots, tokens), np.append(table, measured)
    expected = float(np.interp(tokens, knots, table))
    error = min(max(measured, expected / _OUTLIER_RATIO), expected * _OUTLIER_RATIO) - expected
    right = int(np.clip(np.searchsorted(knots, tokens), 1, len(knots) - 1))
    share = float(np.clip((tokens - knots[right - 1]) / (knots[right] - knots[right - 1]), 0.0, 1.0))
    weights = np.array([1.0 - share, share])
    moved = table.copy()
    # Scaled so that the curve at `tokens` itself moves by alpha times the error.
    moved[right - 1 : right + 1] += alpha * error * weights / float(weights @ weights)
    return knots, moved


def _parsed(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"cost table: not JSON ({error})") from error
    _require(isinstance(data, dict), "top level", "an object", data)
    _require(data.get("kind") == _KIND, "kind", f'"{_KIND}"', data.get("kind"))
    return data


def _numbers(data: dict[str, Any], name: str) -> list[float]:
    values = data.get(name)
    if not isinstance(values, list) or any(isinstance(v, bool) or not isinstance(v, int | float) for v in values):
        raise ConfigError(f"cost table: field {name} must be a list of numbers, got {values!r}")
    return [float(v) for v in values]


def _require(condition: bool, name: str, expected: str, got: object) -> None:
    if not condition:
        raise ConfigError(f"cost table: field {name} must be {expected}, got {got!r}")
