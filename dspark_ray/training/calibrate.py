"""The calibrate stage: one table of Sequential Temperature Scaling a mode, from drafts of real decoding (paper 3.2.1).

Fitted on the drafts of one half of the prompts, judged on those of the other.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from dspark_ray.algorithm.calibration import (
    SequentialTemperatureScaling,
    expected_calibration_error,
    fit_sts,
)
from dspark_ray.algorithm.mode_calibration import MODES, CalibrationMode, ModeCalibration
from dspark_ray.engine.recording import DraftOutcomes
from dspark_ray.errors import ConfigError
from dspark_ray.offline import Completion
from dspark_ray.training.measurement import Meter, Prompts, sampling_of
from dspark_ray.training.scores import Reliability, reliability, roc_auc

MIN_DRAFTS = 100  # fewer than this fit noise


@dataclass(frozen=True, slots=True)
class ModeReport:
    """What one mode's table does to the drafts it was not fitted on."""

    table: SequentialTemperatureScaling
    num_held_out: int
    ece_before: tuple[float, ...]  # K, of the survival at each position
    ece_unshifted: tuple[float, ...]  # K, by temperatures alone, as in the paper
    ece_after: tuple[float, ...]  # K
    auc: tuple[float | None, ...]  # K, of the raw survival
    before: tuple[Reliability, ...]  # K
    after: tuple[Reliability, ...]  # K

    @property
    def mean_ece(self) -> tuple[float, float]:
        """Over positions, before and after."""
        return float(np.mean(self.ece_before)), float(np.mean(self.ece_after))


@dataclass(frozen=True, slots=True)
class CalibrationSettings:
    temperature: float  # of the rejection and coupled modes
    max_tokens: int
    concurrency: int


async def calibrate(
    meter: Meter,
    prompts: Prompts,
    settings: CalibrationSettings,
    provenance: Mapping[str, str],
    on_done: Callable[[Completion], None] | None = None,
) -> tuple[ModeCalibration, dict[CalibrationMode, ModeReport]]:
    """Decode all prompts in each mode with a drafter whose confidences are raw, and fit.

    Raises ConfigError where the prompts give too few drafts.
    """
    reports: dict[CalibrationMode, ModeReport] = {}
    for mode in MODES:
        sampling = sampling_of(mode, settings.temperature, settings.max_tokens)
        fitted, held_out = [
            (await meter.measure(half, sampling, settings.concurrency, on_done)).outcomes.complete()
            for half in (prompts[::2], prompts[1::2])
        ]
        made = {**provenance, "mode": mode, "temperature": f"{sampling.temperature:g}"}
        reports[mode] = report_mode(fitted, held_out, made)
    return ModeCalibration({mode: report.table for mode, report in reports.items()}), reports


def report_mode(fitted: DraftOutcomes, held_out: DraftOutcomes, provenance: Mapping[str, str]) -> ModeReport:
    """Fit on one half and judge on the other; both verified in full and drafted with raw confidences."""
    if min(len(fitted), len(held_out)) < MIN_DRAFTS:
        raise ConfigError(
            f"the prompts gave {len(fitted)} and {len(held_out)} drafts verified in full, expected at least "
            f"{MIN_DRAFTS} in each half; give more prompts (--prompts FILES, or a corpus with more validation "
            "prompts: a larger corpus.num_reply_tokens or corpus.validation_share) or longer replies"
        )
    table = fit_sts(fitted.logits, fitted.accepted, provenance=provenance, shifted=True)
    unshifted = fit_sts(fitted.logits, fitted.accepted)
    raw = np.cumprod(held_out.confidences, axis=1)
    calibrated, scaled = (
        np.cumprod(each.apply(held_out.logits).astype(np.float64), axis=1) for each in (table, unshifted)
    )
    survived = np.arange(held_out.num_draft_tokens) < held_out.accepted[:, None]
    columns = range(held_out.num_draft_tokens)
    return ModeReport(
        table,
        len(held_out),
        tuple(expected_calibration_error(raw[:, k], survived[:, k]) for k in columns),
        tuple(expected_calibration_error(scaled[:, k], survived[:, k]) for k in columns),
        tuple(expected_calibration_error(calibrated[:, k], survived[:, k]) for k in columns),
        tuple(roc_auc(raw[:, k], survived[:, k]) for k in columns),
        tuple(reliability(raw[:, k], survived[:, k]) for k in columns),
        tuple(reliability(calibrated[:, k], survived[:, k]) for k in columns),
    )
