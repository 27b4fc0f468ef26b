"""The HTTP surface over a real engine in this process: the routes, the answers, the errors, usage, aborts."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.api import create_api
from deployments.engine_backend import EngineBackend
from deployments.protocol import GenerateRequest
from deployments.service import GenerationService
from dspark_ray.config import AppConfig
from dspark_ray.engine.engine import Engine
from dspark_ray.engine.local_executor import LocalExecutor
from dspark_ray.errors import RequestError
from dspark_ray.request import SamplingParams
from tests.chat_models import MAX_MODEL_LEN

GREEDY = {"model": "tiny", "temperature": 0, "ignore_eos": True}
CHAT = {**GREEDY, "messages": [{"role": "user", "content": "hi"}]}


@dataclass
class Api:
    """A client of the API, and what is behind it."""

    client: httpx.AsyncClient
    engine: Engine
    service: GenerationService

    async def post(self, route: str, **body: Any) -> httpx.Response:
        return await self.client.post(f"/v1/{route}", json=body)

    async def events(self, route: str, **body: Any) -> list[dict[str, Any]]:
        """The parsed events of a stream that ends properly."""
        response = await self.post(route, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.text.split("\n\n") if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@asynccontextmanager
async def serving(config: AppConfig) -> AsyncIterator[Api]:
    folder = config.target.model
    engine = Engine(config, LocalExecutor(config), folder)
    await engine.start()
    service = GenerationService(EngineBackend(engine, config.target.name, Path(folder)), config)
    transport = httpx.ASGITransport(create_api(service), raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            yield Api(client, engine, service)
    finally:
        await engine.close()


Test = Callable[[Api], Awaitable[None]]


@pytest.fixture
def run(app_config: AppConfig) -> Callable[..., None]:
    """Run an async test against a fresh server; keyword arguments override the `serving` section."""

    def run_test(test: Test, **overrides: Any) -> None:
        serving_section = app_config.serving.model_copy(update=overrides)
        config = app_config.model_copy(update={"serving": serving_section})

        async def main() -> None:
            async with serving(config) as api:
                await test(api)
                assert api.engine.stats()["running"] == api.engine.stats()["waiting"] == 0
                assert api.engine.stats()["pages"]["free"] == api.engine.stats()["pages"]["total"]

        asyncio.run(main())

    return run_test


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert body["error"]["message"]
    return body["error"]


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def test_a_stream_adds_up_to_the_whole_answer(run: Callable[..., None]) -> None:
    async def test(api: Api) -> None:
        for route, body in (("completions", {**GREEDY, "prompt": "hello"}), ("chat/completions", CHAT)):
            whole = (await api.post(route, max_tokens=24, **body)).json()
            events = await api.events(route, max_tokens=24, **body)
            choice = whole["choices"][0]
            assert text_of(events) == (choice["text"] if "text" in choice else choice["message"]["content"])
            assert whole["usage"]["completion_tokens"] == 24
            assert whole["model"] == "tiny"
            reasons = [event["choices"][0]["finish_reason"] for event in events]
            assert reasons == [None] * (len(events) - 1) + ["length"]
            assert all(event["id"] == events[0]["id"] for event in events)

    run(test)


def test_chat_streams_begin_with_the_role_and_have_their_object_names(run: Callable[..., None]) -> None:
    async def test(api: Api) -> None:
        events = await api.events("chat/completions", max_tokens=8, **CHAT)
        assert events[0]["choices"][0]["delta"]["role"] == "assistant"
        assert all("role" not in event["choices"][0]["delta"] for event in events[1:])
        assert {event["object"] for event in events} == {"chat.completion.chunk"}
        assert (await api.post("chat/completions", max_tokens=1, **CHAT)).json()["object"] == "chat.completion"

    run(test)


def test_usage_counts_tokens_and_comes_once_in_a_last_event_without_choices(run: Callable[..., None]) -> None:
    async def test(api: Api) -> None:
        body = {**GREEDY, "prompt": "hello", "max_tokens": 21, "stream_options": {"include_usage": True}}
        events = await api.events("completions", **body)
        assert all(event["usage"] is None for event in events[:-1])
        assert events[-1]["choices"] == []
        usage = events[-1]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 21, 26)
        counts = usage["speculation"]
        assert counts["emitted"] == 21
        # The drafter is the target itself: several tokens a step, so fewer events than tokens.
        assert 0 < counts["accepted"] <= counts["admitted"] <= counts["drafted"]
        assert len(events) < 21
        plain = await api.events("completions", **{**body, "stream_options": None})
        assert all("usage" not in event for event in plain)

    run(test)


def test_choices_and_prompts_keep_their_indices_and_usage_adds_up(run: Callable[..., None]) -> None:
    async def test(api: Api) -> None:
        sampled = {"model": "tiny", "ignore_eos": True, "max_tokens": 6, "seed": 11}
        both = (await api.post("completions", prompt=["ab", "xyz"], n=2, **sampled)).json()
        assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
        assert (both["usage"]["prompt_tokens"], both["usage"]["completion_tokens"]) == (5, 24)
        texts = [choice["text"] for choice in both["choices"]]
        for prompt, expected in (("ab", texts[:2]), ("xyz", texts[2:])):
            alone = (await api.post("completions", prompt=prompt, n=2, **sampled)).json()
            assert [choice["text"] for choice in alone["choices"]] == expected
        second = (await api.post("completions", prompt="ab", **{**sampled, "seed": 12})).json()
        assert second["choices"][0]["text"] == texts[1] != texts[0]
        events = await api.events("completions", prompt=["ab", "xyz"], n=2, **sampled)
        assert [text_of(events, index) for index in range(4)] == texts

    run(test)


def test_token_ids_are_prompts_too_and_echo_gives_the_prompt_back(run: Callable[..., None]) -> None:
    async def test(api: Api) -> None:
        text = (await api.post("completions", prompt="ab", max_tokens=4, **GREEDY)).json()["choices"][0]["text"]
        ids = [ord("a") - 33, ord("b") - 33]
        for prompt in (ids, [ids]):
            answer = (await api.post("completions", prompt=prompt, max_tokens=4, echo=True, **GREEDY)).json()
            assert answer["choices"][0]["text"] == "ab" + text
        events = await api.events("completions", prompt="ab", max_tokens=4, echo=True, **GREEDY)
        assert text_of(events) == "ab" + text

    run(test)


def test_a_stop_string_ends_the_answer_and_is_never_shown(run: Callable[..., None]) -> None:
    async def test(api: Api) -> None:
        body = {**GREEDY, "prompt": "hello", "max_tokens": 40}
        full = (await api.post("completions", **body)).json()["choices"][0]["text"]
        clean = next(at for at in range(4, len(full) - 2) if "\ufffd" not in full[at : at + 2])
        stop = full[clean : clean + 2]
        for stops in (stop, ["not there", stop]):
            answer = (await api.post("completions", stop=stops, **body)).json()
            assert answer["choices"][0] == {
                "index": 0,
                "text": full[: full.index(stop)],
                "logprobs": None,
                "finish_reason": "stop",
            }
            events = await api.events("completions", stop=stops, **body)
            assert text_of(events) == full[: full.index(stop)]

    run(test)


def test_seeded_output_is_the_same_with_speculation_off(run: Callable[..., None]) -> None:
    async def test(api: Api) -> None:
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 24, "seed": 5, "ignore_eos": True}
        on = (await api.post("completions", **body)).json()
        off = (await api.post("completions", speculation={"enabled": False}, **body)).json()
        assert on["choices"] == off["choices"]
        assert on["usage"]["speculation"]["admitted"] > 0
        assert off["usage"]["speculation"]["drafted"] == off["usage"]["speculation"]["admitted"] == 0

    run(test)


def test_prompts_around_the_context_length(run: Callable[..., None]) -> None:
    async def test(api: Api) -> None:
        for length, status in ((-1, 200), (0, 400), (1, 400), (9 * MAX_MODEL_LEN, 400)):
            for prompt in ("a" * (MAX_MODEL_LEN + length), [1] * (MAX_MODEL_LEN + length)):
                response = await api.post("completions", prompt=prompt, **GREEDY)
                assert response.status_code == status, response.text
                if status == 400:
                    error = error_of(response)
                    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
                else:
                    assert response.json()["usage"]["completion_tokens"] == 1

    run(test)


def test_more_tokens_than_fit_are_refused_and_the_default_fills_the_context(run: Callable[..., None]) -> None:
    async def test(api: Api) -> None:
        prompt = "a" * (MAX_MODEL_LEN - 9)
        too_many = await api.post("completions", prompt=prompt, max_tokens=10, **GREEDY)
        assert error_of(too_many)["code"] == "context_length_exceeded"
        fits = await api.post("completions", prompt=prompt, max_tokens=9, **GREEDY)
        assert fits.json()["usage"]["completion_tokens"] == 9
        chat = await api.post("chat/completions", **{**CHAT, "messages": [{"role": "user", "content": "a" * 440}]})
        assert chat.json()["usage"]["total_tokens"] == MAX_MODEL_LEN
        assert chat.json()["choices"][0]["finish_reason"] == "length"

    run(test)


BAD_INPUT: list[tuple[str, dict[str, Any], int, str, str | None]] = [
    ("completions", {"prompt": "a", "model": "gpt-9"}, 404, "model", "model_not_found"),
    ("completions", {"prompt": [259 + 5]}, 400, "prompt", "invalid_token_id"),
    ("completions", {"prompt": [-1]}, 400, "prompt", "invalid_token_id"),
    ("completions", {"prompt": [2**80]}, 400, "prompt", "invalid_token_id"),
    ("completions", {"prompt": "a", "stop_token_ids": [10**6]}, 400, "stop_token_ids", "invalid_token_id"),
    ("completions", {"prompt": "a", "n": 9}, 400, "n", None),
    ("completions", {"prompt": ["a"] * 33}, 400, "prompt", None),
    ("completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", None),
    ("completions", {"prompt": "a", "max_tokens": -1}, 400, "max_tokens", None),
    ("completions", {"prompt": ""}, 400, "prompt", "empty_prompt"),
    ("completions", {}, 400, "prompt", "missing_field"),
    ("chat/completions", {"messages": [{"role": "user", "content": "refuse me"}]}, 400, "messages", None),
    (
        "chat/completions",
        {"messages": [{"role": "alien", "content": "x"}]},
        400,
        "messages[0].role",
        "invalid_value",
    ),
    ("chat/completions", {}, 400, "messages", "missing_field"),
    ("chat/completions", {**CHAT, "temperature": -1}, 400, "temperature", None),
]


def test_bad_input_gets_openai_errors_and_disturbs_nobody(run: Callable[..., None]) -> None:
    async def test(api: Api) -> None:
        neighbour = asyncio.create_task(api.post("completions", prompt="hello", max_tokens=300, **GREEDY))
        for route, body, status, param, code in BAD_INPUT:
            for stream in (False, True):
                response = await api.post(route, stream=stream, **body)
                assert response.status_code == status, (body, response.text)
                error = error_of(response)
                assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
        assert (await neighbour).json()["usage"]["completion_tokens"] == 300

    run(test)


def test_broken_json_unknown_routes_and_methods_get_openai_errors(run: Callable[..., None]) -> None:
    async def test(api: Api) -> None:
        json_type = {"content-type": "application/json"}
        for content in ("{", "", "[]", '"x"', "null", "[" * 100_000):
            broken = await api.client.post("/v1/completions", content=content, headers=json_type)
            assert (broken.status_code, error_of(broken)["type"]) == (400, "invalid_request_error")
        nan = await api.client.post("/v1/completions", content='{"prompt":"a","top_p":NaN}', headers=json_type)
        assert (nan.status_code, error_of(nan)["param"]) == (400, "top_p")
        assert error_of(await api.client.get("/v2/nothing"))["type"] == "invalid_request_error"
        assert (await api.client.get("/v1/completions")).status_code == 405
        error_of(await api.client.get("/v1/completions"))

    run(test)


def test_models_health_ready_and_stats(run: Callable[..., None]) -> None:
    async def test(api: Api) -> None:
        assert [model["id"] for model in (await api.client.get("/v1/models")).json()["data"]] == ["tiny"]
        assert (await api.client.get("/v1/models/tiny")).json()["object"] == "model"
        missing = await api.client.get("/v1/models/none")
        assert (missing.status_code, error_of(missing)["code"]) == (404, "model_not_found")
        assert (await api.client.get("/health")).status_code == 200
        assert (await api.client.get("/ready")).json() == {"status": "ready", "model": "tiny"}
        usage = (await api.post("completions", prompt="hello", max_tokens=20, **GREEDY)).json()["usage"]
        stats = (await api.client.get("/stats")).json()
        assert stats["totals"]["emitted"] == usage["completion_tokens"]
        assert stats["totals"]["running"] == 0
        assert stats["targets"][0]["mean_accepted_length"] > 1

    run(test)


def test_a_dead_engine_is_unready_and_answers_503_with_retry_after(run: Callable[..., None]) -> None:
    async def test(api: Api) -> None:
        await api.post("completions", prompt="a", **GREEDY)
        api.engine._die("lost on purpose")
        ready = await api.client.get("/ready")
        refused = await api.post("completions", prompt="a", stream=True, **GREEDY)
        for response in (ready, refused):
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) >= 1
            assert error_of(response)["code"] == "unavailable"
        assert (await api.client.get("/health")).status_code == 200

    run(test)


def test_too_many_at_once_get_429_with_retry_after_and_the_others_finish(run: Callable[..., None]) -> None:
    async def test(api: Api) -> None:
        posts = [api.post("completions", prompt="hello", max_tokens=40, stream=i % 2 == 0, **GREEDY) for i in range(12)]
        responses = await asyncio.gather(*posts)
        refused = [response for response in responses if response.status_code == 429]
        assert len(refused) == 8
        assert all(int(response.headers["retry-after"]) >= 1 for response in refused)
        assert error_of(refused[0])["code"] == "rate_limit_exceeded"
        assert api.service.num_jobs == 0

    run(test, max_ongoing_requests=4)


def test_the_engines_own_limit_is_429_too(run: Callable[..., None]) -> None:
    async def test(api: Api) -> None:
        posts = [api.post("completions", prompt="hello", n=8, max_tokens=40, **GREEDY) for _ in range(6)]
        statuses = sorted(response.status_code for response in await asyncio.gather(*posts))
        assert statuses == [200] * 4 + [429] * 2

    run(test)


def test_a_request_that_takes_too_long_is_408_or_an_error_event(run: Callable[..., None]) -> None:
    async def test(api: Api) -> None:
        body = {**GREEDY, "prompt": "hello", "max_tokens": 480}
        late = await api.post("completions", **body)
        assert (late.status_code, error_of(late)["code"]) == (408, "request_timeout")
        stream = await api.post("completions", stream=True, **body)
        *events, last = [line for line in stream.text.split("\n\n") if line]
        assert stream.status_code == 200
        assert events
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"

    run(test, request_timeout_seconds=0.1)


def test_a_stream_that_fails_midway_ends_in_one_error_event(run: Callable[..., None]) -> None:
    async def test(api: Api) -> None:
        job = asyncio.create_task(api.post("completions", prompt="hello", max_tokens=480, stream=True, **GREEDY))
        while not api.engine.stats()["emitted"]:
            await asyncio.sleep(0.001)
        api.engine._die("lost on purpose")
        lines = [line for line in (await job).text.split("\n\n") if line]
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "unavailable"
        assert all("error" not in json.loads(line.removeprefix("data: ")) for line in lines[:-1])

    run(test)


@pytest.mark.parametrize("after", [0.0, 0.002, 0.05])
def test_cancelled_handlers_abort_their_requests_and_no_others(run: Callable[..., None], after: float) -> None:
    async def test(api: Api) -> None:
        body = {**GREEDY, "prompt": "hello", "max_tokens": 400}
        expected = (await api.post("completions", **body)).json()["choices"]
        stays = asyncio.create_task(api.post("completions", **body))
        leaving = [asyncio.create_task(api.post("completions", stream=i % 2 == 0, n=2, **body)) for i in range(6)]
        await asyncio.sleep(after)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        async with asyncio.timeout(2):
            while api.engine.stats()["running"] + api.engine.stats()["waiting"] > 1:
                await asyncio.sleep(0.01)
        assert (await stays).json()["choices"] == expected
        assert api.service.num_jobs == 0

    run(test)


def test_python_callers_get_text_token_ids_and_counts(run: Callable[..., None]) -> None:
    async def test(api: Api) -> None:
        whole = (await api.post("completions", prompt="hello", max_tokens=12, **GREEDY)).json()
        sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        ids = tuple(ord(char) - 33 for char in "hello")
        for request in (GenerateRequest(prompt="hello", sampling=sampling), GenerateRequest(None, None, ids, sampling)):
            chunks = [chunk async for chunk in api.service.generate(request)]
            assert "".join(chunk.text for chunk in chunks) == whole["choices"][0]["text"]
            assert sum(len(chunk.token_ids) for chunk in chunks) == 12
            assert sum(chunk.counts.accepted for chunk in chunks) > 0
            assert chunks[-1].finish_reason == "length"
        with pytest.raises(RequestError, match="vocabulary"):
            async with aclosing(api.service.generate(GenerateRequest(prompt_token_ids=(999,)))) as stream:
                await anext(stream)

    run(test)
