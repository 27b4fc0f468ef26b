"""PNG pictures like the paper's Figures 2, 5 and 6, and of a training run. Reads figures, computes none."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dspark_ray.algorithm.mode_calibration import CalibrationMode
from dspark_ray.training.calibrate import ModeReport
from dspark_ray.training.scores import PositionAcceptance, Reliability, ThresholdPoint
from dspark_ray.training.training_loop import TrainingRecord

DPI = 110
REJECTED = "#bbbbbb"


def draw_acceptance(curves: Mapping[str, Mapping[str, PositionAcceptance]], path: Path) -> None:
    """Conditional acceptance along the block: a panel each title, a line each drafter (Figure 2)."""
    figure, panels = _panels(len(curves), height=3.4)
    for axes, (title, lines) in zip(panels, curves.items(), strict=True):
        for name, acceptance in lines.items():
            axes.plot(np.arange(1, len(acceptance.conditional) + 1), acceptance.conditional, marker="o", label=name)
        axes.set(title=title, xlabel="draft position", ylim=(0, 1))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("accepted, of those reached")
    panels[-1].legend(fontsize=8)
    figure.savefig(path, dpi=DPI)


def draw_threshold_sweep(sweeps: Mapping[str, Sequence[ThresholdPoint]], path: Path) -> None:
    """Tokens a step, verified in vain, and acceptance over the threshold: a panel each title (Figure 5)."""
    figure, panels = _panels(len(sweeps), height=3.2)
    for axes, (title, points) in zip(panels, sweeps.items(), strict=True):
        x = np.arange(len(points))
        tokens = [point.tokens_per_step for point in points]
        axes.bar(x, tokens, color="tab:blue", label="emitted")
        rejected = [point.rejected_per_step for point in points]
        axes.bar(x, rejected, bottom=tokens, color=REJECTED, hatch="//", label="rejected")
        axes.set(title=title, xlabel="threshold on the survival", ylabel="tokens a step")
        axes.set_xticks(x, [f"{point.threshold:g}" for point in points])
        rate = axes.twinx()
        rates = [np.nan if point.acceptance is None else point.acceptance for point in points]
        rate.plot(x, rates, color="tab:red", marker="o", label="acceptance rate")
        rate.set(ylim=(0, 1), ylabel="acceptance rate")
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=DPI)


def draw_reliability(reports: Mapping[CalibrationMode, ModeReport], path: Path) -> None:
    """Predicted against observed survival: a row each mode, a panel each other position (Figure 6)."""
    positions = range(0, max(len(report.ece_after) for report in reports.values()), 2)
    figure = Figure(figsize=(2.6 * len(positions), 2.7 * len(reports)), layout="constrained")
    grid = figure.subplots(len(reports), len(positions), squeeze=False, sharex=True, sharey=True)
    for row, (mode, report) in zip(grid, reports.items(), strict=True):
        for axes, k in zip(row, positions, strict=True):
            if k < len(report.ece_after):
                _reliability_panel(axes, report.before[k], report.after[k])
                axes.set_title(
                    f"{mode}, position {k + 1}\nECE {report.ece_before[k]:.1%} to {report.ece_after[k]:.1%}", fontsize=8
                )
        row[0].set_ylabel("observed survival")
    grid[0][0].legend(fontsize=7)
    figure.savefig(path, dpi=DPI)


def draw_training(records: Sequence[TrainingRecord], path: Path) -> None:
    """Loss, acceptance of first, middle and last position, and accepted length over the steps of a run."""
    figure, panels = _panels(3, height=3.4)
    for split, style in (("train", "-"), ("validation", "o--")):
        own = [record for record in records if record.split == split]
        if not own:
            continue
        steps = [record.step for record in own]
        panels[0].plot(steps, [record.loss for record in own], style, label=split)
        last = len(own[0].acceptance) - 1
        for color, k in zip(("tab:blue", "tab:orange", "tab:green"), (0, last // 2, last), strict=True):
            values = [record.acceptance[k] for record in own]
            panels[1].plot(steps, values, style, color=color, label=f"position {k + 1}, {split}")
        panels[2].plot(steps, [record.accepted_length for record in own], style, label=split)
    for axes, title in zip(panels, ("loss", "acceptance (teacher-forced)", "expected accepted length"), strict=True):
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        if records:
            axes.legend(fontsize=7)
    figure.savefig(path, dpi=DPI)


def _reliability_panel(axes: Axes, before: Reliability, after: Reliability) -> None:
    centres = (np.arange(len(after.counts)) + 0.5) / len(after.counts)
    axes.bar(centres, after.counts / max(1, after.counts.max()), width=1 / len(centres), color="#e8e8e8")
    axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle=":", label="perfect")
    axes.plot(before.predicted, before.observed, color="tab:red", marker=".", label="before")
    axes.plot(after.predicted, after.observed, color="tab:blue", marker=".", label="after")
    axes.set(xlim=(0, 1), ylim=(0, 1))


def _panels(count: int, height: float) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(4.2 * count, height), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])
