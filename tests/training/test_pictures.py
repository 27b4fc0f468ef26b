"""Pictures are drawn from figures of every shape that measurements give: gaps, short blocks, one split."""

from pathlib import Path

import numpy as np

from dspark_ray.engine.recording import DraftOutcomes
from dspark_ray.training.calibrate import report_mode
from dspark_ray.training.pictures import draw_acceptance, draw_reliability, draw_threshold_sweep, draw_training
from dspark_ray.training.scores import position_acceptance, threshold_sweep
from tests.training.test_run_folder import record

PNG = b"\x89PNG"


def _outcomes(num_drafts: int, num_positions: int) -> DraftOutcomes:
    rng = np.random.default_rng(num_positions)
    accepted = rng.integers(0, num_positions + 1, num_drafts)
    confidences = rng.random((num_drafts, num_positions))
    return DraftOutcomes(confidences, np.full(num_drafts, num_positions), accepted)


def test_acceptance_and_thresholds_of_several_data_sets(tmp_path: Path) -> None:
    outcomes, none = _outcomes(40, 5), _outcomes(0, 5)
    curves = {"a": position_acceptance(outcomes), "b": position_acceptance(none)}
    draw_acceptance({"chat": curves, "code": {"a": curves["a"]}}, tmp_path / "acceptance.png")
    sweeps = {name: threshold_sweep(each, np.array([0.0, 0.5, 2.0])) for name, each in (("x", outcomes), ("y", none))}
    draw_threshold_sweep(sweeps, tmp_path / "threshold.png")
    for name in ("acceptance", "threshold"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)


def test_reliability_of_modes_with_blocks_of_different_length(tmp_path: Path) -> None:
    reports = {
        "greedy": report_mode(_outcomes(120, 5), _outcomes(120, 5), {}),
        "coupled": report_mode(_outcomes(120, 2), _outcomes(120, 2), {}),
    }
    draw_reliability(reports, tmp_path / "reliability.png")
    assert (tmp_path / "reliability.png").read_bytes().startswith(PNG)


def test_training_curves_with_and_without_validation_or_records(tmp_path: Path) -> None:
    for name, records in {
        "both": [record(10), record(20), record(20, 0.5, "validation")],
        "train": [record(10)],
        "none": [],
    }.items():
        draw_training(records, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)
