"""Sequential temperature scaling: recovers a planted temperature, lowers the error of the product, keeps the order."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dspark_ray.algorithm.calibration import SequentialTemperatureScaling, expected_calibration_error, fit_sts
from dspark_ray.errors import ConfigError

PLANTED = (2.0, 0.5, 3.0)


def planted_data(samples: int = 60_000) -> tuple[np.ndarray, np.ndarray]:
    """Logits [S, 3] whose true conditional acceptance is sigmoid(logit / T_k), and the accepted lengths [S]."""
    rng = np.random.default_rng(0)
    logits = rng.normal(1.0, 2.0, (samples, 3)) * np.array(PLANTED)
    accepted = rng.random((samples, 3)) < 1 / (1 + np.exp(-logits / np.array(PLANTED)))
    return logits, np.cumprod(accepted, axis=1).sum(axis=1)


def test_planted_temperatures_are_recovered_and_the_error_falls() -> None:
    logits, lengths = planted_data()
    sts = fit_sts(logits, lengths, provenance={"data": "planted"})
    assert sts.temperatures == pytest.approx(PLANTED, rel=0.15)
    assert all(after < 0.015 for after in sts.ece_after)
    assert all(after < before for after, before in zip(sts.ece_after, sts.ece_before, strict=True))
    assert sts.num_samples == len(logits)
    assert sts.provenance == {"data": "planted"}


def test_the_error_recorded_is_that_of_the_cumulative_product() -> None:
    logits, lengths = planted_data(5000)
    sts = fit_sts(logits, lengths)
    product = np.cumprod(sts.apply(logits), axis=1)
    for k in range(3):
        assert expected_calibration_error(product[:, k], lengths > k) == pytest.approx(sts.ece_after[k], abs=2e-3)


def test_a_mask_of_acceptances_means_the_same_as_lengths() -> None:
    logits, lengths = planted_data(3000)
    mask = np.arange(3) < lengths[:, None]
    mask[:, 2] |= lengths == 1  # an acceptance after a rejection counts for nothing
    assert fit_sts(logits, mask).temperatures == fit_sts(torch.from_numpy(logits), lengths).temperatures


def test_calibration_keeps_the_order_of_drafts() -> None:
    logits = np.sort(np.random.default_rng(1).normal(size=(200, 3)), axis=0)
    calibrated = SequentialTemperatureScaling(PLANTED).apply(logits)
    assert (np.diff(calibrated, axis=0) >= 0).all()
    assert calibrated.dtype == np.float32


def test_calibrated_data_are_left_alone() -> None:
    rng = np.random.default_rng(2)
    logits = np.zeros((4000, 2))
    accepted = rng.random((4000, 2)) < 0.5
    assert fit_sts(logits, accepted).temperatures == pytest.approx((1.0, 1.0))


def test_logits_and_probabilities_are_calibrated_alike() -> None:
    sts = SequentialTemperatureScaling((2.0, 0.7))
    logits = np.array([[0.3, -4.0], [2.0, 0.0]])
    assert sts.apply_confidences(1 / (1 + np.exp(-logits))) == pytest.approx(sts.apply(logits), abs=1e-6)
    edges = sts.apply_confidences(np.array([0.0, 1.0]))
    assert edges.tolist() == [0.0, 1.0]
    assert np.isnan(sts.apply_confidences(np.array([np.nan, 0.5]))[0])
    assert sts.apply(torch.tensor([[0.0]])).tolist() == [[0.5]], "a shorter block uses the first temperatures"


def test_a_longer_block_than_calibrated_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 draft positions"):
        SequentialTemperatureScaling((1.0, 1.0)).apply(np.zeros(3))


def test_identity_changes_nothing() -> None:
    confidences = np.array([[0.1, 0.9, 0.5]])
    assert SequentialTemperatureScaling.identity(3).apply_confidences(confidences) == pytest.approx(confidences)


def test_expected_calibration_error_of_known_cases() -> None:
    assert expected_calibration_error(np.array([0.9, 0.9, 0.1, 0.1]), np.array([1, 1, 0, 0])) == pytest.approx(0.1)
    assert expected_calibration_error(np.full(10, 0.7), np.arange(10) < 7) == pytest.approx(0.0)
    assert expected_calibration_error(np.array([1.0, 0.0]), np.array([0, 1])) == pytest.approx(1.0)


def test_a_calibration_survives_its_file(tmp_path: Path) -> None:
    sts = SequentialTemperatureScaling(PLANTED, 7, (0.1, 0.2, 0.3), (0.0, 0.1, 0.1), {"data": "chat"})
    sts.save(tmp_path / "calibration.json")
    assert SequentialTemperatureScaling.load(tmp_path / "calibration.json") == sts


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"temperatures": None}, "temperatures"),
        ({"temperatures": []}, "temperatures"),
        ({"temperatures": [1.0, 0.0]}, "temperatures"),
        ({"temperatures": [1.0, "x"]}, "temperatures"),
        ({"num_samples": "many"}, "num_samples"),
        ({"ece_before": [0.1]}, "ece_before"),
        ({"ece_after": 3}, "ece_after"),
        ({"provenance": 3}, "provenance"),
        ({"shifts": [0.5]}, "shifts"),
        ({"shifts": [0.5, float("nan")]}, "shifts"),
        ({"kind": "cost_table"}, "kind"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, change: dict[str, object], field: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({**json.loads(SequentialTemperatureScaling((1.0, 2.0)).to_json()), **change}))
    with pytest.raises(ConfigError, match=f"{path.name}.*field {field}"):
        SequentialTemperatureScaling.load(path)


def test_fitting_without_matching_data_is_refused() -> None:
    with pytest.raises(ValueError, match="one acceptance for each of 4 drafts"):
        fit_sts(np.zeros((4, 2)), np.zeros(3))


def test_a_shift_mends_what_no_temperature_can() -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(0.5, 1.0, (40_000, 2))
    accepted = rng.random((40_000, 2)) < 1 / (1 + np.exp(-(logits / 2.0 - 1.5)))
    unshifted, shifted = (fit_sts(logits, accepted, shifted=flag) for flag in (False, True))
    assert unshifted.shifts == ()
    assert min(unshifted.ece_after) > 0.03
    assert max(shifted.ece_after) < 0.01
    assert shifted.shifts == pytest.approx((-1.5, -1.5), abs=0.1)
    assert shifted.temperatures[0] == pytest.approx(2.0, rel=0.2)
    again = SequentialTemperatureScaling.from_json(shifted.to_json())
    assert (again.apply(logits) == shifted.apply(logits)).all()
    assert (np.diff(shifted.apply(np.sort(logits, axis=0)), axis=0) >= 0).all(), "the order of drafts is kept"


def test_shifts_of_drafts_that_never_survive_stay_finite() -> None:
    table = fit_sts(np.zeros((50, 3)), np.zeros(50), shifted=True)
    assert np.isfinite(table.shifts).all()
    assert table.apply(np.zeros(3))[0] < 1e-4
