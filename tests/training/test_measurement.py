"""Measured figures equal a count over the completions themselves."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dspark_ray.algorithm.calibration import SequentialTemperatureScaling
from dspark_ray.config import AppConfig
from dspark_ray.engine.drafters.factory import CALIBRATION_FILE
from dspark_ray.offline import Completion
from dspark_ray.request import SamplingParams
from dspark_ray.training.measurement import Measurement, open_meter, sampling_of

PROMPTS = [(5, 6, 7, 8), (1, 2, 3), (40, 41, 42, 43, 44, 45), (9, 9)]
MakeConfig = Callable[..., AppConfig]


@pytest.fixture
def make_config(fixtures_dir: Path) -> MakeConfig:
    def make(kind: str = "dspark", model: str | None = "draft_vanilla", **drafter: object) -> AppConfig:
        return AppConfig.model_validate(
            {
                "target": {"model": str(fixtures_dir / "target"), "dtype": "float32", "device": "cpu"},
                "drafter": {"kind": kind, "model": str(fixtures_dir / model) if model else None, **drafter},
                "engine": {"page_size": 4, "num_pages": 400, "max_num_seqs": 16},
            }
        )

    return make


def measure(
    config: AppConfig, sampling: SamplingParams, concurrency: int = 3, *, raw: bool = False, times: int = 1
) -> tuple[Measurement, list[Completion]]:
    """The last of `times` measurements by one meter, and its completions."""

    async def main() -> tuple[Measurement, list[Completion]]:
        async with open_meter(config, raw_confidences=raw) as meter:
            for _ in range(times):
                done: list[Completion] = []
                measured = await meter.measure(PROMPTS, sampling, concurrency, done.append)
        return measured, done

    return asyncio.run(main())


@pytest.mark.parametrize("kind", ["dspark", "ngram", "draft_model"])
@pytest.mark.parametrize("mode", ["greedy", "rejection", "coupled"])
def test_accepted_length_equals_the_count_from_raw_completions(make_config: MakeConfig, kind: str, mode: str) -> None:
    model = {"dspark": "draft_vanilla", "draft_model": "target"}.get(kind)
    measured, done = measure(make_config(kind, model), sampling_of(mode, 1.0, 24))  # type: ignore[arg-type]
    assert len(done) == len(PROMPTS)
    emitted = sum(len(each.token_ids) - 1 for each in done)
    rounds = sum(each.num_rounds for each in done)
    assert (measured.emitted, measured.rounds) == (emitted, rounds)
    assert measured.accepted_length == pytest.approx(emitted / rounds)
    assert measured.drafted == sum(each.counts.drafted for each in done)
    assert measured.outcomes.admitted.sum() == sum(each.counts.admitted for each in done)
    if kind == "draft_model" and mode != "rejection":
        assert measured.accepted_length > 2.0, "the target drafts for itself"


def test_drafts_are_verified_in_full_whatever_the_policy_was(make_config: MakeConfig) -> None:
    measured, _ = measure(make_config(), sampling_of("greedy", 1.0, 24))
    outcomes = measured.outcomes
    assert outcomes.num_draft_tokens == 5
    short = outcomes.admitted < 5  # only where a reply has no more room
    assert 0 < len(outcomes.complete()) == (~short).sum()
    assert short.sum() <= 4 * len(PROMPTS)


def test_a_measurement_holds_nothing_of_the_one_before(make_config: MakeConfig) -> None:
    once, _ = measure(make_config(), sampling_of("greedy", 1.0, 16))
    second, _ = measure(make_config(), sampling_of("greedy", 1.0, 16), times=2)
    assert len(second.outcomes) == len(once.outcomes)
    assert second.as_dict() | {"tokens_per_second": 0} == once.as_dict() | {"tokens_per_second": 0}


def test_seeded_prompts_have_seeds_of_their_own_and_repeat(make_config: MakeConfig) -> None:
    sampling = sampling_of("coupled", 1.0, 12)
    (_, first), (_, again) = (measure(make_config(), sampling) for _ in range(2))

    def replies(done: list[Completion]) -> dict[str, tuple[int, ...]]:
        return {each.request_id: each.token_ids for each in done}

    assert replies(first) == replies(again)


def test_raw_confidences_are_those_without_the_calibration_beside_the_drafter(
    make_config: MakeConfig, fixtures_dir: Path, tmp_path: Path
) -> None:
    table = tmp_path / CALIBRATION_FILE
    SequentialTemperatureScaling((9.0,) * 5).save(table)
    sampling = sampling_of("greedy", 1.0, 12)
    plain, _ = measure(make_config(), sampling, 1)
    raw, _ = measure(make_config(calibration=str(table)), sampling, 1, raw=True)
    scaled, _ = measure(make_config(calibration=str(table)), sampling, 1)
    assert raw.outcomes.confidences == pytest.approx(plain.outcomes.confidences, abs=1e-5)
    assert np.abs(scaled.outcomes.confidences - plain.outcomes.confidences).max() > 0.1
    assert (scaled.outcomes.accepted == plain.outcomes.accepted).all()


def test_plain_decoding_has_length_one_and_no_drafts(make_config: MakeConfig) -> None:
    measured, _ = measure(make_config("none", None), sampling_of("greedy", 1.0, 12))
    assert measured.accepted_length == 1.0
    assert measured.drafted == len(measured.outcomes) == 0


@pytest.mark.parametrize(
    ("mode", "greedy", "coupled"), [("greedy", True, False), ("rejection", False, False), ("coupled", False, True)]
)
def test_a_modes_sampling_is_judged_by_that_mode(mode: str, greedy: bool, coupled: bool) -> None:
    sampling = sampling_of(mode, 0.8, 9)  # type: ignore[arg-type]
    assert (sampling.greedy, sampling.coupled, sampling.max_tokens) == (greedy, coupled, 9)
