"""The cost table: monotone, interpolated, refined by real steps, and strict about what it loads."""

import json
from pathlib import Path

import numpy as np
import pytest

from dspark_ray.algorithm.cost_table import CostTable, cache_file_name, never_decreasing
from dspark_ray.errors import ConfigError

TABLE = CostTable((1, 4, 8), (0.1, 0.1, 0.3), draft_seconds=0.05, provenance={"model": "tiny"})


def test_seconds_are_clamped_below_linear_inside_and_extrapolated_beyond() -> None:
    tokens = np.array([0, 1, 3, 4, 6, 8, 10])
    assert TABLE.step_seconds_at(tokens) == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.2, 0.3, 0.4])
    assert TABLE.step_seconds_at(6) == pytest.approx(0.2)


def test_steps_per_second_include_drafting() -> None:
    assert TABLE.steps_per_second(8) == pytest.approx(1 / 0.35)
    assert TABLE.steps_per_second(np.array([1, 8])) == pytest.approx([1 / 0.15, 1 / 0.35])


def test_measurements_are_sorted_merged_and_made_monotone() -> None:
    table = CostTable.from_measurements([8, 1, 4, 4, 4, 2], [0.5, 0.1, 0.2, 9.0, 0.3, 0.4], 0.01, {"device": "cpu"})
    assert table.batch_tokens == (1, 2, 4, 8)
    assert table.step_seconds == pytest.approx((0.1, 0.35, 0.35, 0.5))
    assert table.provenance == {"device": "cpu"}


def test_the_monotone_fit_is_the_nearest_one() -> None:
    assert never_decreasing(np.array([3.0, 1.0, 2.0, 5.0, 4.0])).tolist() == [2.0, 2.0, 2.0, 4.5, 4.5]
    rng = np.random.default_rng(0)
    values = rng.random(40).cumsum() + 3 * rng.random(40)
    fit = never_decreasing(values)
    assert (np.diff(fit) >= 0).all()
    assert ((fit - values) ** 2).sum() <= ((np.maximum.accumulate(values) - values) ** 2).sum()


def test_real_steps_pull_the_curve_to_them_and_keep_it_monotone() -> None:
    table = TABLE
    for _ in range(200):
        table = table.refined(6, 0.28, alpha=0.1).refined(2, 0.15, alpha=0.1)
    assert table.step_seconds_at(6) == pytest.approx(0.28, rel=0.02)
    assert table.step_seconds_at(2) == pytest.approx(0.15, rel=0.02)
    assert (np.diff(table.step_seconds) >= 0).all()
    assert TABLE.step_seconds == (0.1, 0.1, 0.3), "the old table is untouched"


def test_one_step_moves_the_curve_by_alpha_and_one_outlier_by_little() -> None:
    assert TABLE.refined(6, 0.22, alpha=0.5).step_seconds_at(6) == pytest.approx(0.21)
    assert TABLE.refined(8, 60.0, alpha=0.05).step_seconds_at(8) < 0.4
    for useless in (np.nan, np.inf, 0.0, -1.0):
        assert TABLE.refined(6, useless) == TABLE


def test_batches_far_beyond_the_profile_get_a_knot_of_their_own() -> None:
    table = TABLE.refined(np.array([9, 64]), np.array([0.3, 2.0]), alpha=0.1)
    assert table.batch_tokens == (1, 4, 8, 64)
    assert table.step_seconds_at(64) == pytest.approx(2.0)


def test_draft_seconds_are_averaged_in_when_given() -> None:
    assert TABLE.refined(6, 0.2, alpha=0.5, draft_seconds=0.15).draft_seconds == pytest.approx(0.1)
    assert TABLE.with_draft_seconds(0.2).draft_seconds == 0.2


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    TABLE.save(tmp_path / "cost.json")
    assert CostTable.load(tmp_path / "cost.json") == TABLE


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"batch_tokens": None}, "batch_tokens"),
        ({"batch_tokens": [4, 1, 8]}, "batch_tokens"),
        ({"batch_tokens": [1, 2.5, 8]}, "batch_tokens"),
        ({"batch_tokens": [1], "step_seconds": [0.1]}, "batch_tokens"),
        ({"step_seconds": [0.1, 0.2]}, "step_seconds"),
        ({"step_seconds": [0.3, 0.2, 0.4]}, "step_seconds"),
        ({"step_seconds": [0.1, "x", 0.4]}, "step_seconds"),
        ({"step_seconds": [0.1, float("nan"), 0.4]}, "step_seconds"),
        ({"draft_seconds": "fast"}, "draft_seconds"),
        ({"draft_seconds": -1.0}, "draft_seconds"),
        ({"provenance": []}, "provenance"),
        ({"kind": "other"}, "kind"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, change: dict[str, object], field: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({**TABLE.as_dict(), **change}))
    with pytest.raises(ConfigError, match=f"{path.name}.*field {field}"):
        CostTable.load(path)


def test_a_file_that_is_absent_or_no_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.json"):
        CostTable.load(tmp_path / "absent.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match=r"broken.json.*not JSON"):
        CostTable.load(tmp_path / "broken.json")


def test_the_cache_file_differs_with_everything_that_changes_speed() -> None:
    base = ("org/Model-1B", "bfloat16", "NVIDIA H200", 2, {"torch": "2.9"})
    names = {
        cache_file_name(*base),
        cache_file_name("other/Model-1B", *base[1:]),
        cache_file_name(base[0], "float32", *base[2:]),
        cache_file_name(*base[:2], "cpu", *base[3:]),
        cache_file_name(*base[:3], 1, base[4]),
        cache_file_name(*base[:4], {"torch": "2.10"}),
    }
    assert len(names) == 6
    assert all("/" not in name and " " not in name and name.endswith(".json") for name in names)
    assert cache_file_name(*base) == cache_file_name(*base)
