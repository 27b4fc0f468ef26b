"""A table for each rule that judges a draft: every row by its own, files old and new, errors that name the field."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_ray.algorithm.calibration import SequentialTemperatureScaling
from dspark_ray.algorithm.mode_calibration import MODES, CalibrationMode, ModeCalibration
from dspark_ray.errors import ConfigError
from tests.algorithm.helpers import concat_columns, make_columns

TABLES: dict[CalibrationMode, SequentialTemperatureScaling] = {
    "greedy": SequentialTemperatureScaling((1.0, 2.0, 4.0), 7, provenance={"mode": "greedy"}),
    "rejection": SequentialTemperatureScaling((0.5, 0.5, 0.5), shifts=(0.0, 1.0, -1.0)),
    "coupled": SequentialTemperatureScaling((3.0, 1.0, 0.25), 9, (0.1, 0.2, 0.3), (0.0, 0.1, 0.1)),
}
COLUMNS = {
    "greedy": {"temperature": 0.0},
    "rejection": {"temperature": 0.7},
    "coupled": {"temperature": 1.0, "coupled": True},
}


def _document() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(ModeCalibration(TABLES).to_json())
    return content


def _every_mode(table: dict[str, object]) -> dict[str, object]:
    return {mode: table for mode in MODES}


def test_each_row_is_calibrated_by_the_table_of_its_mode() -> None:
    order = ("coupled", "greedy", "rejection", "greedy")
    columns = concat_columns(*(make_columns(1, **COLUMNS[mode]) for mode in order))
    logits = np.random.default_rng(0).normal(size=(4, 3))
    got = ModeCalibration(TABLES).apply(logits, columns)
    assert got.dtype == np.float32
    for row, mode in enumerate(order):
        assert got[row] == pytest.approx(TABLES[mode].apply(logits[row]), abs=1e-7)
    assert len({tuple(row) for row in ModeCalibration(TABLES).apply(np.tile(logits[0], (4, 1)), columns)}) == 3


def test_a_seeded_greedy_row_is_greedy() -> None:
    """Nothing is random at temperature 0, whatever noise would be shared."""
    logits = np.array([[0.4, -1.0, 2.0]])
    got = ModeCalibration(TABLES).apply(logits, make_columns(1, temperature=0.0, coupled=True))
    assert got == pytest.approx(TABLES["greedy"].apply(logits))


def test_a_shorter_block_uses_the_first_positions_and_no_rows_are_no_confidences() -> None:
    calibration = ModeCalibration(TABLES)
    short = calibration.apply(np.ones((2, 2)), make_columns(2, temperature=0.0))
    assert short == pytest.approx(TABLES["greedy"].apply(np.ones((2, 2))))
    assert calibration.apply(np.zeros((0, 3)), make_columns(0)).shape == (0, 3)


def test_the_shortest_table_says_how_many_positions_are_covered() -> None:
    tables = {**TABLES, "coupled": SequentialTemperatureScaling((1.0, 1.0))}
    assert ModeCalibration(TABLES).num_draft_tokens == 3
    assert ModeCalibration(tables).num_draft_tokens == 2


def test_every_table_survives_the_file_with_its_record(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(ModeCalibration(TABLES).to_json())
    assert ModeCalibration.load(path) == ModeCalibration(TABLES)


def test_a_file_of_one_table_holds_for_every_mode(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    TABLES["greedy"].save(path)
    assert ModeCalibration.load(path) == ModeCalibration(dict.fromkeys(MODES, TABLES["greedy"]))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kind": "cost_table"}, "field kind"),
        ({"modes": 3}, "field modes"),
        ({"modes": {}}, "field modes"),
        ({"modes": {"greedy": {}, "rejection": {}}}, "field modes"),
        ({"modes": {"greedy": {}, "rejection": {}, "coupled": {}, "other": {}}}, "field modes"),
        ({"modes": {**_every_mode({"temperatures": [1.0]}), "greedy": 1}}, r"field modes\.greedy"),
        ({"modes": {**_every_mode({"temperatures": [1.0]}), "coupled": {}}}, r"modes\.coupled.*temperatures"),
        ({"modes": _every_mode({"temperatures": [-1.0]})}, r"modes\.greedy.*temperatures"),
        ({"modes": _every_mode({"temperatures": [1.0], "shifts": [1.0, 2.0]})}, r"modes\.greedy.*shifts"),
    ],
)
def test_a_wrong_field_is_named_with_the_file(tmp_path: Path, change: dict[str, object], named: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({**_document(), **change}))
    with pytest.raises(ConfigError, match=f"{path.name}.*{named}"):
        ModeCalibration.load(path)


@pytest.mark.parametrize("text", ["", "[1, 2]", "{", '"text"'])
def test_a_file_that_is_no_calibration_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=path.name):
        ModeCalibration.load(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json cannot be read"):
        ModeCalibration.load(tmp_path / "nowhere.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.json"):
        ModeCalibration.load(tmp_path / "binary.json")
