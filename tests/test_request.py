"""Requests check themselves, and everything that travels pickles."""

import math
import pickle

import pytest

from dspark_ray.errors import RequestError
from dspark_ray.request import MAX_SEED, GenerationChunk, GenerationRequest, SamplingParams, SpeculationCounts


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.5),
        ("min_p", 1.5),
        ("top_k", -2),
        ("max_tokens", 0),
        ("seed", MAX_SEED + 1),
        ("stop", ("end", "")),
    ],
)
def test_a_bad_sampling_parameter_is_refused_by_name(param: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{param: value})  # type: ignore[arg-type]
    assert (caught.value.param, caught.value.status) == (param, 400)


@pytest.mark.parametrize(
    ("param", "value"),
    [("temperature", 0.0), ("temperature", 100.0), ("top_p", 1.0), ("top_k", -1), ("min_p", 1.0), ("seed", -MAX_SEED)],
)
def test_the_edges_of_each_range_are_allowed(param: str, value: object) -> None:
    assert getattr(SamplingParams(**{param: value}), param) == value  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seed", "verification", "coupled"),
    [(None, "auto", False), (7, "auto", True), (0, "auto", True), (7, "rejection", False), (None, "coupled", True)],
)
def test_a_seed_selects_the_coupled_mode_unless_the_mode_is_given(
    seed: int | None, verification: str, coupled: bool
) -> None:
    assert SamplingParams(seed=seed, verification=verification).coupled is coupled  # type: ignore[arg-type]


def test_only_temperature_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0.0).greedy
    assert not SamplingParams(temperature=1e-6).greedy


def test_counts_add_up() -> None:
    assert SpeculationCounts(7, 4, 2, 3) + SpeculationCounts(7, 7, 7, 8) == SpeculationCounts(14, 11, 9, 11)


def test_requests_chunks_and_errors_pickle() -> None:
    request = GenerationRequest("a", (1, 2, 3), SamplingParams(stop=("x",)), num_draft_tokens=3)
    chunk = GenerationChunk("a", "hi", (4,), SpeculationCounts(7, 4, 0, 1), "stop", 3)
    assert pickle.loads(pickle.dumps((request, chunk))) == (request, chunk)
    error = pickle.loads(pickle.dumps(RequestError("too long", param="prompt", code="context_length_exceeded")))
    assert (error.message, error.param, error.code, error.status) == (
        "too long",
        "prompt",
        "context_length_exceeded",
        400,
    )
