"""Calibration by the rule that judges a draft: the same confidence survives at another rate under each (paper 3.2.1).

A drafter keeps one table of Sequential Temperature Scaling a mode in its calibration.json. Letters: R requests, K draft
positions.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from dspark_ray.algorithm.calibration import STS_KIND, SequentialTemperatureScaling
from dspark_ray.algorithm.columns import SamplingColumns
from dspark_ray.errors import ConfigError

CalibrationMode = Literal["greedy", "rejection", "coupled"]
MODES: tuple[CalibrationMode, ...] = get_args(CalibrationMode)


@dataclass(frozen=True, slots=True)
class ModeCalibration:
    """The table of every mode."""

    tables: Mapping[CalibrationMode, SequentialTemperatureScaling]

    @classmethod
    def of_all_modes(cls, table: SequentialTemperatureScaling) -> "ModeCalibration":
        """One table for drafts however they are judged."""
        return cls(dict.fromkeys(MODES, table))

    @property
    def num_draft_tokens(self) -> int:
        """Draft positions that every table covers."""
        return min(len(table.temperatures) for table in self.tables.values())

    def apply(self, confidence_logits: np.ndarray, columns: SamplingColumns) -> np.ndarray:
        """Calibrated conditional confidences [R, K], each row by the table of its mode; float32."""
        out = np.empty(confidence_logits.shape, dtype=np.float32)
        for mode, rows in _rows_of_modes(columns).items():
            if rows.any():
                out[rows] = self.tables[mode].apply(confidence_logits[rows])
        return out

    def to_json(self) -> str:
        return json.dumps(
            {"kind": STS_KIND, "modes": {mode: table.to_dict() for mode, table in self.tables.items()}}, indent=2
        )

    @classmethod
    def from_json(cls, text: str) -> "ModeCalibration":
        """Also reads a file of one table, which then holds for every mode. Raises ConfigError naming the field."""
        try:
            data: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"calibration: not JSON ({error})") from error
        modes = data.get("modes") if isinstance(data, dict) else None
        if modes is None:
            return cls.of_all_modes(SequentialTemperatureScaling.from_json(text))
        if data.get("kind") != STS_KIND:
            raise ConfigError(f'calibration: field kind must be "{STS_KIND}", got {data.get("kind")!r}')
        if not isinstance(modes, dict) or set(modes) != set(MODES):
            got = sorted(modes) if isinstance(modes, dict) else modes
            raise ConfigError(f"calibration: field modes must be an object with {', '.join(MODES)}, got {got!r}")
        return cls({mode: _table(mode, modes[mode]) for mode in MODES})

    @classmethod
    def load(cls, path: str | Path) -> "ModeCalibration":
        """Raises ConfigError naming the file and the field."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"calibration {path} cannot be read: {error}") from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error


def _rows_of_modes(columns: SamplingColumns) -> dict[CalibrationMode, np.ndarray]:
    greedy = columns.greedy
    return {"greedy": greedy, "rejection": ~greedy & ~columns.coupled, "coupled": ~greedy & columns.coupled}


def _table(mode: str, data: object) -> SequentialTemperatureScaling:
    if not isinstance(data, dict):
        raise ConfigError(f"calibration: field modes.{mode} must be an object, got {data!r}")
    try:
        return SequentialTemperatureScaling.from_dict(data)
    except ConfigError as error:
        raise ConfigError(f"modes.{mode}: {error}") from error
