"""What bodies are accepted, what they mean, and that a refusal names its field."""

import math
import pickle
from typing import Any

import pytest
from pydantic import ValidationError

from deployments.errors import to_request_error
from deployments.protocol import ChatCompletionRequest, CompletionRequest, GenerateRequest, normalize_prompt
from dspark_ray.errors import RequestError
from dspark_ray.request import MAX_SEED, SamplingParams

USER = {"role": "user", "content": "hi"}


def refusal(kind: type[ChatCompletionRequest] | type[CompletionRequest], **body: Any) -> RequestError:
    """The error of a body that must not be served, wherever it is found."""
    with pytest.raises((ValidationError, RequestError)) as caught:
        kind.model_validate(body).sampling(0, 16)
    error = caught.value
    return error if isinstance(error, RequestError) else to_request_error(error.errors())


@pytest.mark.parametrize(
    ("value", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
    ],
)
def test_every_form_of_prompt_becomes_a_list_of_prompts(value: Any, prompts: list[Any]) -> None:
    assert normalize_prompt(value) == prompts


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        (None, "prompt"),
        (5, "prompt"),
        ({"a": 1}, "prompt"),
        ([""], "prompt[0]"),
        ([[1], []], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        ([1, 2.5], "prompt[1]"),
        ([True], "prompt[0]"),
        (["a", None], "prompt[1]"),
        (["a", 3], "prompt[1]"),
        ("a\ud800", "prompt"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(value: Any, param: str) -> None:
    assert refusal(CompletionRequest, prompt=value).param == param


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", []),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("max_tokens", "5"),
        ("n", 0),
        ("n", "2"),
        ("seed", "x"),
        ("seed", 2**63),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", 5),
        ("stop", [5]),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("ignore_eos", "no"),
        ("echo", "no"),
        ("model", 5),
    ],
)
def test_a_field_of_wrong_type_or_range_is_refused_by_name(field: str, value: Any) -> None:
    error = refusal(CompletionRequest, prompt="a", **{field: value})
    assert (error.status, error.param) == (400, field)


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"role": "alien", "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([USER, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
    ],
)
def test_a_bad_message_is_refused_by_its_place(value: Any, param: str) -> None:
    assert refusal(ChatCompletionRequest, messages=value).param == param


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", 0),
        ("logprobs", True),
        ("top_logprobs", 3),
        ("logit_bias", {"5": 1}),
        ("frequency_penalty", 0.5),
        ("presence_penalty", -1),
        ("repetition_penalty", 1.1),
        ("response_format", {"type": "json_object"}),
        ("tools", [{"type": "function"}]),
        ("best_of", 3),
        ("suffix", "x"),
        ("min_tokens", 4),
    ],
)
def test_what_would_change_the_output_and_is_not_served_is_refused_by_name(field: str, value: Any) -> None:
    error = refusal(CompletionRequest, prompt="a", **{field: value})
    assert (error.param, error.code) == (field, "unsupported_parameter")


def test_neutral_values_and_unknown_fields_are_accepted() -> None:
    neutral = {"logprobs": False, "logit_bias": {}, "frequency_penalty": 0.0, "presence_penalty": 0, "tools": None}
    body = CompletionRequest.model_validate({"prompt": "a", "response_format": {"type": "text"}, "store": 1, **neutral})
    assert body.sampling(0, 16) == SamplingParams(max_tokens=16)


def test_null_means_the_default_everywhere() -> None:
    names = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "seed", "n", "stream", "stream_options"]
    body = CompletionRequest.model_validate({"prompt": "a", **dict.fromkeys(names)})
    assert body.sampling(0, 16) == SamplingParams(max_tokens=16)
    assert body.num_choices == 1


def test_every_sampling_field_arrives() -> None:
    body = ChatCompletionRequest.model_validate(
        {
            "messages": [USER],
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "min_p": 0.1,
            "max_tokens": 3,
            "max_completion_tokens": 4,
            "stop": "x",
            "stop_token_ids": [1, 2],
            "ignore_eos": True,
            "seed": -5,
            "speculation": {"enabled": False, "num_draft_tokens": 2, "verification": "coupled"},
        }
    )
    assert body.token_limit == 4
    assert body.sampling(0, 4) == SamplingParams(0.5, 7, 0.9, 0.1, -5, 4, ("x",), (1, 2), True, "coupled")
    assert (body.speculation_options.enabled, body.speculation_options.num_draft_tokens) == (False, 2)


def test_top_p_zero_is_accepted_and_keeps_the_likeliest_token_alone() -> None:
    assert 0 < CompletionRequest.model_validate({"prompt": "a", "top_p": 0}).sampling(0, 1).top_p <= 1e-6


@pytest.mark.parametrize("options", [{"enabled": 1}, {"num_draft_tokens": -1}, {"verification": "magic"}, {"what": 1}])
def test_a_bad_speculation_option_is_refused_by_its_place(options: dict[str, Any]) -> None:
    error = refusal(CompletionRequest, prompt="a", speculation=options)
    assert error.param == f"speculation.{next(iter(options))}"


def test_choices_of_one_request_have_seeds_of_their_own_that_can_be_had_alone() -> None:
    body = CompletionRequest.model_validate({"prompt": "a", "n": 3, "seed": 7})
    assert [body.sampling(choice, 1).seed for choice in range(3)] == [7, 8, 9]
    last = CompletionRequest.model_validate({"prompt": "a", "n": 2, "seed": MAX_SEED})
    assert abs(last.sampling(1, 1).seed or 0) <= MAX_SEED


def test_text_parts_are_joined_and_developers_speak_as_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = ChatCompletionRequest.model_validate({"messages": [{"role": "developer", "content": parts}]})
    assert body.messages[0].for_template() == {"role": "system", "content": "ab"}


def test_a_python_request_has_exactly_one_kind_of_prompt_and_pickles() -> None:
    for prompts in ({}, {"prompt": "a", "prompt_token_ids": (1,)}):
        with pytest.raises(RequestError, match="exactly one"):
            GenerateRequest(**prompts)  # type: ignore[arg-type]
    request = GenerateRequest(messages=({"role": "user", "content": "x"},))
    assert pickle.loads(pickle.dumps(request)) == request
