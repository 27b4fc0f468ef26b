"""The evaluate stage: drafters side by side on the same prompts, every draft verified in full (paper 4.2).

Letters: K draft positions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark_ray.config import AppConfig
from dspark_ray.engine.recording import DraftOutcomes, concatenate
from dspark_ray.offline import Completion
from dspark_ray.training.measurement import Measurement, Prompts, open_meter, sampling_of
from dspark_ray.training.scores import PositionAcceptance, confidence_auc, position_acceptance

SHIPPED_GOALS = {0.0: 3.0, 1.0: 2.3}  # mean accepted length over the data sets, by temperature
RIVAL_GOALS = {"dflash": 1.16, "autoregressive": 1.27}  # the paper's ratios of mean accepted lengths (Table 1)

DataSets = Mapping[str, Prompts]


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    temperatures: Sequence[float]
    max_tokens: int
    concurrency: int


@dataclass(frozen=True, slots=True)
class DrafterReport:
    """One drafter's measurements by temperature and data set."""

    name: str
    measurements: Mapping[float, Mapping[str, Measurement]]

    def mean_accepted_length(self, temperature: float) -> float:
        """Over data sets, each counted once."""
        return float(np.mean([each.accepted_length for each in self.measurements[temperature].values()]))

    def tokens_per_second(self, temperature: float) -> float:
        measured = self.measurements[temperature].values()
        seconds = sum(each.token_seconds for each in measured)
        return sum(each.emitted for each in measured) / seconds if seconds else 0.0

    @property
    def drafts(self) -> bool:
        """Whether it drafted at all: plain decoding does not."""
        return any(each.drafted for by_name in self.measurements.values() for each in by_name.values())

    def acceptance(self, temperature: float) -> PositionAcceptance:
        """Over all data sets."""
        return position_acceptance(self._outcomes(temperature))

    def data_set_acceptance(self, temperature: float, data_set: str) -> PositionAcceptance:
        return position_acceptance(self.measurements[temperature][data_set].outcomes)

    def auc(self, temperature: float) -> float | None:
        """Of the confidences, over all data sets."""
        return confidence_auc(self._outcomes(temperature)) if self.drafts else None

    def _outcomes(self, temperature: float) -> DraftOutcomes:
        return concatenate([each.outcomes for each in self.measurements[temperature].values()])

    def as_dict(self) -> dict[str, Any]:
        return {
            f"T={temperature:g}": {
                "mean_accepted_length": round(self.mean_accepted_length(temperature), 4),
                "tokens_per_second": round(self.tokens_per_second(temperature), 2),
                "data_sets": {name: _data_set(measured) for name, measured in data_sets.items()},
            }
            for temperature, data_sets in self.measurements.items()
        }


async def evaluate(
    name: str,
    config: AppConfig,
    data_sets: DataSets,
    settings: EvaluationSettings,
    on_done: Callable[[Completion], None] | None = None,
) -> DrafterReport:
    """Decode every data set at every temperature with the drafter that `config` names."""
    measurements: dict[float, dict[str, Measurement]] = {}
    async with open_meter(config) as meter:
        for temperature in settings.temperatures:
            sampling = sampling_of("rejection" if temperature else "greedy", temperature, settings.max_tokens)
            measurements[temperature] = {
                data_set: await meter.measure(prompts, sampling, settings.concurrency, on_done)
                for data_set, prompts in data_sets.items()
            }
    return DrafterReport(name, measurements)


def goals(reports: Sequence[DrafterReport]) -> dict[str, dict[str, Any]]:
    """What the figures are held against: the drafter called `dspark` (else the first), and its ratio to the rivals.

    Plain decoding is held against nothing."""
    by_name = {report.name: report for report in reports}
    ours = by_name.get("dspark", reports[0])
    out: dict[str, dict[str, Any]] = {}
    if not ours.drafts:
        return out
    for temperature in ours.measurements:
        value = ours.mean_accepted_length(temperature)
        if temperature in SHIPPED_GOALS:
            out[f"accepted_length_T{temperature:g}"] = _goal(value, SHIPPED_GOALS[temperature])
        for rival, ratio in RIVAL_GOALS.items():
            if rival in by_name and rival != ours.name:
                achieved = value / by_name[rival].mean_accepted_length(temperature)
                out[f"ratio_to_{rival}_T{temperature:g}"] = _goal(achieved, ratio)
    return out


def _goal(value: float, goal: float) -> dict[str, Any]:
    return {"value": round(value, 4), "goal": goal, "met": value >= goal}


def _data_set(measured: Measurement) -> dict[str, Any]:
    out = measured.as_dict()
    if len(measured.outcomes):
        acceptance = position_acceptance(measured.outcomes)
        out["conditional_acceptance"] = _rounded(acceptance.conditional)
        out["cumulative_acceptance"] = _rounded(acceptance.cumulative)
        auc = confidence_auc(measured.outcomes)
        out["confidence_auc"] = None if auc is None else round(auc, 4)
    return out


def _rounded(values: np.ndarray) -> list[float | None]:
    return [None if np.isnan(value) else round(float(value), 4) for value in values]
