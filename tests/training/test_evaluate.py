"""Evaluation: figures by hand from the outcomes, goals only where they apply, and JSON that any reader takes."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from dspark_ray.config import AppConfig
from dspark_ray.engine.recording import DraftOutcomes
from dspark_ray.offline import Completion
from dspark_ray.training.evaluate import (
    RIVAL_GOALS,
    SHIPPED_GOALS,
    DrafterReport,
    EvaluationSettings,
    evaluate,
    goals,
)
from dspark_ray.training.measurement import Measurement

DATA_SETS = {"chat": [(5, 6, 7, 8), (1, 2, 3)], "code": [(40, 41, 42, 43)]}


def measurement(emitted: int, rounds: int, accepted: tuple[int, ...] = (2, 0, 1)) -> Measurement:
    confidences = np.array([[0.9, 0.8], [0.3, 0.6], [0.7, 0.2]])[: len(accepted)]
    outcomes = DraftOutcomes(confidences, np.full(len(accepted), 2), np.array(accepted, dtype=np.int64))
    return Measurement(outcomes, 2 * len(accepted), emitted, rounds, 4.0)


def report(name: str, *lengths: float, temperatures: tuple[float, ...] = (0.0, 1.0)) -> DrafterReport:
    """A drafter with the given accepted length in each data set, at every temperature."""
    by_name = {f"set {index}": measurement(round(100 * length), 100) for index, length in enumerate(lengths)}
    return DrafterReport(name, dict.fromkeys(temperatures, by_name))


def test_every_data_set_counts_once_in_the_mean_length() -> None:
    both = DrafterReport("x", {0.0: {"large": measurement(200, 100), "small": measurement(8, 2)}})
    assert both.mean_accepted_length(0.0) == pytest.approx((2.0 + 4.0) / 2)
    assert both.tokens_per_second(0.0) == pytest.approx(208 / 8)


def test_figures_over_all_data_sets_are_those_of_all_their_drafts() -> None:
    both = DrafterReport("x", {0.0: {"a": measurement(5, 3), "b": measurement(4, 2, (1, 1))}})
    acceptance = both.acceptance(0.0)
    assert acceptance.judged.tolist() == [5, 4]
    assert acceptance.conditional == pytest.approx([4 / 5, 1 / 4])
    # judged confidences: hits .9 .8 .7 .9 .3, misses .3 .2 .8 .6
    wins = sum((a > b) + 0.5 * (a == b) for a in (0.9, 0.8, 0.7, 0.9, 0.3) for b in (0.3, 0.2, 0.8, 0.6))
    assert both.auc(0.0) == pytest.approx(wins / 20)
    assert both.data_set_acceptance(0.0, "b").conditional.tolist() == [1.0, 0.0]


def test_goals_name_the_drafter_and_its_rivals_and_no_others() -> None:
    ours, dflash, other = report("dspark", 3.0, 4.0), report("dflash", 3.0, 3.0), report("ngram", 9.0, 9.0)
    got = goals([other, dflash, ours])
    assert set(got) == {
        "accepted_length_T0",
        "accepted_length_T1",
        "ratio_to_dflash_T0",
        "ratio_to_dflash_T1",
    }
    assert got["accepted_length_T0"] == {"value": 3.5, "goal": SHIPPED_GOALS[0.0], "met": True}
    assert got["ratio_to_dflash_T1"] == {"value": 1.1667, "goal": RIVAL_GOALS["dflash"], "met": True}
    missed = goals([report("dspark", 2.0), report("autoregressive", 1.9)])
    assert [each["met"] for each in missed.values()] == [False] * 4


def test_a_temperature_without_a_goal_has_only_ratios() -> None:
    got = goals([report("dspark", 2.0, temperatures=(0.5,)), report("dflash", 1.0, temperatures=(0.5,))])
    assert set(got) == {"ratio_to_dflash_T0.5"}


def test_a_rival_alone_is_held_against_no_ratio_to_itself() -> None:
    assert not any("ratio" in name for name in goals([report("dflash", 2.0)]))


def test_plain_decoding_is_held_against_no_goal() -> None:
    plain = Measurement(DraftOutcomes(np.zeros((0, 0)), np.zeros(0, int), np.zeros(0, int)), 0, 50, 50, 1.0)
    assert goals([DrafterReport("none", {0.0: {"chat": plain}})]) == {}


def run(
    fixtures_dir: Path, kind: str, data_sets: dict[str, list[tuple[int, ...]]]
) -> tuple[DrafterReport, list[Completion]]:
    model = {"dspark": str(fixtures_dir / "draft_vanilla")}.get(kind)
    config = AppConfig.model_validate(
        {
            "target": {"model": str(fixtures_dir / "target"), "dtype": "float32", "device": "cpu", "num_threads": 1},
            "drafter": {"kind": kind, "model": model, "dtype": "float32", "device": "cpu"},
            "engine": {"page_size": 4, "num_pages": 200, "max_num_seqs": 4},
        }
    )
    done: list[Completion] = []
    settings = EvaluationSettings((0.0, 1.0), 16, 2)
    return asyncio.run(evaluate(kind, config, data_sets, settings, done.append)), done


@pytest.mark.parametrize("kind", ["dspark", "ngram", "none"])
def test_accepted_length_of_each_data_set_equals_the_count_from_completions(fixtures_dir: Path, kind: str) -> None:
    got, done = run(fixtures_dir, kind, DATA_SETS)
    assert len(done) == 2 * 3
    parts = iter((done[:2], done[2:3], done[3:5], done[5:]))
    for temperature in (0.0, 1.0):
        for name in DATA_SETS:
            completions = next(parts)
            emitted = sum(len(each.token_ids) - 1 for each in completions)
            rounds = sum(each.num_rounds for each in completions)
            measured = got.measurements[temperature][name]
            assert (measured.emitted, measured.rounds) == (emitted, rounds)
    text = json.dumps(got.as_dict(), allow_nan=False)
    assert set(json.loads(text)["T=1"]["data_sets"]) == set(DATA_SETS)
    assert got.drafts == (kind != "none")
    if kind == "none":
        assert got.auc(0.0) is None
        assert got.mean_accepted_length(1.0) == 1.0


def test_a_data_set_without_prompts_or_drafts_spoils_no_other(fixtures_dir: Path) -> None:
    got, _ = run(fixtures_dir, "dspark", {**DATA_SETS, "empty": []})
    assert got.acceptance(0.0).judged[0] > 0
    assert got.auc(0.0) is not None
    json.dumps(got.as_dict(), allow_nan=False)
