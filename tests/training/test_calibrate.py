"""Calibration: planted errors are mended on drafts that were not fitted, and what real decoding gives is served."""

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dspark_ray.algorithm.calibration import expected_calibration_error
from dspark_ray.algorithm.mode_calibration import MODES, ModeCalibration
from dspark_ray.config import AppConfig
from dspark_ray.engine.drafters.factory import CALIBRATION_FILE, build_drafter
from dspark_ray.engine.recording import DraftOutcomes
from dspark_ray.errors import ConfigError
from dspark_ray.training.calibrate import MIN_DRAFTS, CalibrationSettings, report_mode
from dspark_ray.training.pipeline import calibrate_drafter

K = 5


def planted(num_drafts: int, seed: int, temperature: float = 2.0, shift: float = -1.0) -> DraftOutcomes:
    """Drafts that survive by sigmoid(logit / temperature + shift) where the drafter says sigmoid(logit)."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0.5, 2.0, (num_drafts, 3))
    hits = rng.random(logits.shape) < 1 / (1 + np.exp(-(logits / temperature + shift)))
    accepted = np.cumprod(hits, axis=1).sum(1)
    return DraftOutcomes(1 / (1 + np.exp(-logits)), np.full(num_drafts, 3), accepted)


def test_the_error_on_drafts_that_were_not_fitted_falls_below_the_goal() -> None:
    report = report_mode(planted(20_000, 0), planted(20_000, 1), {"data": "planted"})
    before, after = report.mean_ece
    assert after < 0.015 < 0.05 < before
    assert np.mean(report.ece_unshifted) > after, "no temperature moves a confidence across one half"
    assert report.table.shifts == pytest.approx((-1.0,) * 3, abs=0.2)
    assert report.table.provenance["data"] == "planted"
    assert report.num_held_out == 20_000


def test_reported_errors_are_those_of_the_held_out_half() -> None:
    fitted, held_out = planted(2000, 0), planted(2000, 1)
    report = report_mode(fitted, held_out, {})
    survived = np.arange(3) < held_out.accepted[:, None]
    raw = np.cumprod(held_out.confidences, axis=1)
    after = np.cumprod(report.table.apply_confidences(held_out.confidences).astype(float), axis=1)
    for k in range(3):
        assert report.ece_before[k] == pytest.approx(expected_calibration_error(raw[:, k], survived[:, k]))
        # Rounding may carry a draft into the next bin.
        assert report.ece_after[k] == pytest.approx(expected_calibration_error(after[:, k], survived[:, k]), abs=2e-3)
        assert report.before[k].counts.sum() == report.after[k].counts.sum() == 2000
    assert all(auc is not None and 0.6 < auc < 1 for auc in report.auc)


def test_calibration_keeps_what_was_calibrated() -> None:
    report = report_mode(planted(5000, 0, 1.0, 0.0), planted(5000, 1, 1.0, 0.0), {})
    before, after = report.mean_ece
    assert after < before + 0.01


@pytest.mark.parametrize("sizes", [(MIN_DRAFTS - 1, 500), (500, MIN_DRAFTS - 1), (0, 0)])
def test_too_few_drafts_are_refused_and_the_message_says_what_to_do(sizes: tuple[int, int]) -> None:
    fitted, held_out = (planted(size, 0) for size in sizes)
    with pytest.raises(ConfigError, match=f"{sizes[0]} and {sizes[1]} drafts.*at least 100.*give more prompts"):
        report_mode(fitted, held_out, {})


def calibrated(config: AppConfig, folder: Path, num_prompts: int, out: Path | None = None) -> dict[str, object]:
    prompts = [(5, 6 + index, 7) for index in range(num_prompts)]
    settings = CalibrationSettings(temperature=1.0, max_tokens=44, concurrency=8)
    return dict(asyncio.run(calibrate_drafter(config, folder, prompts, settings, "made up", lambda done: None, out)))


@pytest.fixture
def config(fixtures_dir: Path, tmp_path: Path) -> AppConfig:
    """The tiny target and a copy of its drafter."""
    folder = tmp_path / "drafter"
    shutil.copytree(fixtures_dir / "draft_vanilla", folder)
    target = {"model": str(fixtures_dir / "target"), "dtype": "float32", "device": "cpu", "num_threads": 1}
    return AppConfig.model_validate(
        {
            "target": target,
            "drafter": {"kind": "dspark", "model": str(folder), "dtype": "float32", "device": "cpu"},
            "engine": {"page_size": 16, "num_pages": 100, "max_num_seqs": 8},
        }
    )


def test_real_decoding_writes_a_calibration_that_the_server_loads(config: AppConfig, tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    reports = calibrated(config, folder, 16)
    assert list(reports) == list(MODES)
    loaded = ModeCalibration.load(folder / CALIBRATION_FILE)
    assert loaded.num_draft_tokens == K
    assert loaded.tables == {mode: report.table for mode, report in reports.items()}  # type: ignore[attr-defined]
    for mode, table in loaded.tables.items():
        made = {"data": "made up", "target": config.target.model, "drafter": "drafter", "mode": mode}
        assert made.items() <= table.provenance.items()
        assert table.provenance["temperature"] == ("0" if mode == "greedy" else "1")
        assert table.num_samples >= MIN_DRAFTS
    assert (folder / "calibration.png").read_bytes().startswith(b"\x89PNG")
    drafter = build_drafter(config)
    assert drafter is not None
    assert drafter.num_draft_tokens == K
    # Fitted again beside it: the calibration that is there already is not fitted upon.
    again = tmp_path / "again.json"
    calibrated(config, folder, 16, again)
    greedy = json.loads(again.read_text())["modes"]["greedy"]
    assert greedy == json.loads((folder / CALIBRATION_FILE).read_text())["modes"]["greedy"]


def test_too_few_prompts_leave_the_calibration_that_was_there(config: AppConfig, tmp_path: Path) -> None:
    path = tmp_path / "drafter" / CALIBRATION_FILE
    path.write_text("as it was")
    with pytest.raises(ConfigError, match=r"give more prompts .* or longer replies"):
        calibrated(config, tmp_path / "drafter", 1)
    assert path.read_text() == "as it was"


@pytest.mark.parametrize("name", ["draft_dflash", "draft_autoregressive"])
def test_drafters_without_a_confidence_head_are_calibrated_by_their_top_probability(
    config: AppConfig, fixtures_dir: Path, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / name
    shutil.copytree(fixtures_dir / name, folder)
    kind = name.removeprefix("draft_")
    drafter = config.drafter.model_copy(update={"kind": kind, "model": str(folder)})
    served = config.model_copy(update={"drafter": drafter})
    calibrated(served, folder, 16)
    assert build_drafter(served) is not None
    assert ModeCalibration.load(folder / CALIBRATION_FILE).num_draft_tokens >= 4
