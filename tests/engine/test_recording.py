"""Recording tells what became of every draft and changes nothing of what comes out."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from dspark_ray.config import AppConfig
from dspark_ray.engine.batch import StepResult
from dspark_ray.engine.engine import Engine
from dspark_ray.engine.local_executor import LocalExecutor
from dspark_ray.engine.recording import DraftOutcomes, RecordingExecutor, concatenate
from dspark_ray.offline import Completion, complete_all
from dspark_ray.request import GenerationRequest, SamplingParams
from tests.engine.harness import Run, tokens

MakeConfig = Callable[..., AppConfig]
PROMPTS = [(5, 6, 7, 8), (1, 2, 3), (40, 41, 42, 43, 44, 45)]


def _requests(**sampling: object) -> list[GenerationRequest]:
    params = SamplingParams(**{"max_tokens": 20, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
    return [GenerationRequest(f"r{index}", prompt, params) for index, prompt in enumerate(PROMPTS)]


def _record(config: AppConfig, requests: list[GenerationRequest]) -> tuple[list[Completion], DraftOutcomes]:
    async def main() -> tuple[list[Completion], DraftOutcomes]:
        recorder = RecordingExecutor(LocalExecutor(config))
        engine = Engine(config, recorder, config.target.model)
        await engine.start()
        try:
            completions = await complete_all(engine, requests, len(requests))
        finally:
            await engine.close()
        return completions, recorder.take()

    return asyncio.run(main())


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 4}])
def test_output_is_the_same_with_and_without_recording(
    make_config: MakeConfig, run_requests: Run, sampling: dict[str, object]
) -> None:
    config, requests = make_config(policy="static"), _requests(**sampling)
    plain = run_requests(config, requests)
    recorded, _ = _record(config, requests)
    for completion in recorded:
        assert list(completion.token_ids) == tokens(plain[completion.request_id])


@pytest.mark.parametrize("kind", ["dspark", "draft_model", "ngram"])
def test_outcomes_add_up_to_what_the_requests_say_of_themselves(make_config: MakeConfig, kind: str) -> None:
    """Of one request: a client's acceptances end with its reply, the outcomes do not."""
    config = make_config(kind=kind, policy="static")
    completions, outcomes = _record(config, _requests(temperature=0.0, max_tokens=40)[:1])
    counts = completions[0].counts
    assert outcomes.admitted.sum() == counts.admitted > 0
    assert counts.accepted <= outcomes.accepted.sum() <= counts.accepted + outcomes.num_draft_tokens
    assert (outcomes.accepted <= outcomes.admitted).all()
    assert 0 < outcomes.admitted.min() <= outcomes.admitted.max() <= 3
    assert ((outcomes.confidences >= 0) & (outcomes.confidences <= 1)).all()
    # Every verified draft brings its accepted tokens and one more; a round without a draft brings one.
    without = completions[0].num_rounds - len(outcomes)
    assert without >= 0
    assert len(completions[0].token_ids) - 1 <= outcomes.accepted.sum() + len(outcomes) + without


def test_a_drafter_that_is_the_target_is_accepted_in_full(make_config: MakeConfig) -> None:
    _, outcomes = _record(make_config(kind="draft_model", policy="static"), _requests(temperature=0.0))
    assert (outcomes.accepted == outcomes.admitted).all()


def test_without_a_drafter_there_are_no_outcomes(make_config: MakeConfig) -> None:
    completions, outcomes = _record(make_config(kind="none", policy="none"), _requests())
    assert len(outcomes) == 0
    assert all(len(completion.token_ids) == 20 for completion in completions)


class _Answers:
    """An executor's answers of a step: what is recorded of them is all that is looked at."""

    def __init__(self, *results: StepResult) -> None:
        self._results = iter(results)

    async def step(self, *args: object) -> StepResult:
        return next(self._results)


def _result(survival: list[list[float]], admitted: list[int], accepted: list[int], failed: list[bool]) -> StepResult:
    rows = len(admitted)
    zeros = np.zeros(rows, dtype=np.int64)
    return StepResult(
        0,
        np.zeros((rows, 4), dtype=np.int64),
        zeros,
        np.full(rows, 3),
        np.array(admitted),
        np.array(accepted),
        np.array(survival, dtype=np.float32),
        np.array(failed),
        rows,
        0.1,
    )


def test_conditionals_are_the_ratios_of_survivals_and_rows_without_a_verdict_are_left_out() -> None:
    first = _result(
        [[0.5, 0.25, 0.0], [0.9, 0.9, 0.9], [0.8, 0.4, 0.1], [0.0, 0.0, 0.0]],
        [3, 0, 3, 1],
        [1, 0, 2, 0],
        [False, False, True, False],
    )
    second = _result([[1.0, 1e-35, 1e-36]], [2], [2], [False])
    recorder = RecordingExecutor(_Answers(first, second))  # type: ignore[arg-type]

    async def steps() -> None:
        for _ in range(2):
            await recorder.step(None, (), {})  # type: ignore[arg-type]

    asyncio.run(steps())
    outcomes = recorder.take()
    assert outcomes.confidences.tolist() == [[0.5, 0.5, 0.0], [0.0, 0.0, 0.0], [1.0, pytest.approx(1e-35), 0.0]]
    assert outcomes.admitted.tolist() == [3, 1, 2]
    assert outcomes.accepted.tolist() == [1, 0, 2]
    assert outcomes.complete().accepted.tolist() == [1]
    assert len(recorder.take()) == 0, "taken once"


def test_logits_are_those_of_the_confidences_and_finite_at_the_ends() -> None:
    outcomes = DraftOutcomes(np.array([[0.0, 0.25, 1.0]]), np.array([3]), np.array([1]))
    assert np.isfinite(outcomes.logits).all()
    assert 1 / (1 + np.exp(-outcomes.logits)) == pytest.approx(outcomes.confidences, abs=1e-6)


def test_parts_are_put_together_and_those_without_drafts_do_no_harm() -> None:
    outcomes = DraftOutcomes(np.full((2, 3), 0.5), np.array([3, 2]), np.array([1, 0]))
    none = DraftOutcomes(np.zeros((0, 0)), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    assert concatenate([none, outcomes, outcomes]).admitted.tolist() == [3, 2, 3, 2]
    assert len(concatenate([none, none])) == 0
