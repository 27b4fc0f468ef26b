"""The application on Ray, over real HTTP with OpenAI's client: answers, errors, disconnects, and every kind of loss."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import ray
from ray import serve

from deployments.builder import build_app
from deployments.protocol import GenerateRequest
from dspark_ray.config import AppConfig
from dspark_ray.engine.engine import Engine
from dspark_ray.engine.local_executor import LocalExecutor
from dspark_ray.errors import RequestError
from dspark_ray.request import GenerationRequest, SamplingParams

pytestmark = pytest.mark.ray

APP = "dspark-test"
LONG: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 400, "temperature": 0}
SEEDED: dict[str, Any] = {**LONG, "temperature": 1.0, "seed": 9}
NO_EOS = {"ignore_eos": True}


@dataclass
class Probes:
    """Statuses of /health and /ready while the application starts."""

    seen: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Server:
    url: str
    probes: Probes

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=30)

    def totals(self) -> dict[str, int]:
        return self.get("/stats").json()["totals"]

    def stream(self, overrides: dict[str, Any]) -> str:
        """The text of a streamed completion."""
        events = self.client.completions.create(**{**LONG, **overrides}, stream=True, extra_body=NO_EOS)
        return "".join(event.choices[0].text for event in events)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def watch(url: str, probes: Probes, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            health, ready = (httpx.get(f"{url}/{path}", timeout=10).status_code for path in ("health", "ready"))
            probes.seen.append((health, ready))
        except httpx.HTTPError:
            pass
        time.sleep(0.2)


@pytest.fixture(scope="module")
def serve_config(app_config: AppConfig) -> AppConfig:
    target = app_config.target.model_copy(update={"num_cpus": 0.5})
    drafter = app_config.drafter.model_copy(update={"num_cpus": 0.1, "num_replicas": 2})
    return app_config.model_copy(update={"target": target, "drafter": drafter})


@pytest.fixture(scope="module")
def server(serve_config: AppConfig) -> Iterator[Server]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    probes, stop = Probes(), threading.Event()
    started = not ray.is_initialized()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        if started:
            ray.init(
                address="local",
                num_cpus=8,
                num_gpus=0,
                include_dashboard=False,
                object_store_memory=100 * 2**20,
                log_to_driver=False,
            )
        serve.start(http_options={"port": port})
        watcher = threading.Thread(target=watch, args=(url, probes, stop))
        watcher.start()
        try:
            serve.run(build_app(serve_config), name=APP, route_prefix="/")
            stop.set()
            yield Server(url, probes)
        finally:
            stop.set()
            watcher.join()
            serve.shutdown()
            if started:
                ray.shutdown()


@pytest.fixture(scope="module")
def in_process(serve_config: AppConfig) -> list[str]:
    """The texts of LONG and SEEDED from the same model in one process, without Ray."""

    async def main() -> list[str]:
        engine = Engine(serve_config, LocalExecutor(serve_config), serve_config.target.model)
        await engine.start()
        try:
            return [await text(engine, body) for body in (LONG, SEEDED)]
        finally:
            await engine.close()

    async def text(engine: Engine, body: dict[str, Any]) -> str:
        ids = tuple(ord(char) - 33 for char in body["prompt"])
        names = ("temperature", "max_tokens", "seed")
        sampling = SamplingParams(ignore_eos=True, **{name: body[name] for name in names if name in body})
        return "".join([chunk.text async for chunk in engine.generate(GenerationRequest("x", ids, sampling))])

    return asyncio.run(main())


def eventually(condition: Callable[[], Any], seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)
    return value


def kill_actor(part: str) -> str:
    """Kill one actor whose name contains `part`; returns the name."""
    actors = [actor for actor in ray.util.list_named_actors(all_namespaces=True) if part in actor["name"]]
    ray.kill(ray.get_actor(actors[0]["name"], actors[0]["namespace"]))
    return actors[0]["name"]


def test_health_is_live_while_the_model_loads_and_ready_tells_the_truth(server: Server) -> None:
    assert (200, 503) in server.probes.seen
    first_ready = next((at for at, (_, ready) in enumerate(server.probes.seen) if ready == 200), None)
    assert all(ready == 200 for _, ready in server.probes.seen[first_ready:] if first_ready is not None)
    assert server.get("/ready").json() == {"status": "ready", "model": "tiny"}


def test_streamed_and_whole_answers_equal_the_engine_in_process(server: Server, in_process: list[str]) -> None:
    whole = server.client.completions.create(**LONG, extra_body=NO_EOS)
    assert whole.choices[0].text == in_process[0]
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 400)
    assert [server.stream(body) for body in (LONG, SEEDED)] == in_process


def test_chat_streams_with_usage(server: Server) -> None:
    chat = server.client.chat.completions
    events = list(
        chat.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=20,
            seed=4,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=NO_EOS,
        )
    )
    assert events[0].choices[0].delta.role == "assistant"
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == 20
    messages = [{"role": "user", "content": "hi"}]
    whole = chat.create(model="tiny", messages=messages, max_tokens=20, seed=4, extra_body=NO_EOS)  # type: ignore[call-overload]
    streamed = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert whole.choices[0].message.content == streamed


def test_openais_client_raises_its_own_errors(server: Server) -> None:
    client = server.client
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-9", prompt="a")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model="tiny", prompt="a" * 600)
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=[])
    for response in (server.get("/nothing"), server.get("/v1/completions")):
        assert list(response.json()["error"]) == ["message", "type", "param", "code"]


def test_python_callers_stream_typed_chunks_from_the_app_handle(server: Server, in_process: list[str]) -> None:
    handle = serve.get_app_handle(APP).options(stream=True)
    sampling = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    chunks = list(handle.generate.remote(GenerateRequest(prompt="hello", sampling=sampling)))
    assert "".join(chunk.text for chunk in chunks) == in_process[0]
    assert sum(len(chunk.token_ids) for chunk in chunks) == sum(chunk.counts.emitted for chunk in chunks) == 400
    assert sum(chunk.counts.accepted for chunk in chunks) > 0
    with pytest.raises(RequestError) as refused:
        list(handle.generate.remote(GenerateRequest(prompt_token_ids=(10**6,))))
    assert "vocabulary" in str(refused.value)


def test_actors_have_telling_names_and_stats_show_the_cluster(server: Server) -> None:
    names = " ".join(actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True))
    for part in ("Ingress", "TargetServer", "DrafterServer", "ControllerServer"):
        assert f"#{part}#" in names
    for part in ("TargetWorker", "DraftWorker", "LoadController"):
        assert f"{APP}/{part}" in names
    stats = server.get("/stats").json()
    assert {"drafted", "admitted", "accepted", "emitted"} <= stats["totals"].keys()
    target = stats["targets"][0]
    assert {"acceptance_by_position", "mean_accepted_length", "draft_budget", "cost_table"} <= target.keys()
    assert sum(len(held) for held in stats["controller"]["leases"].values()) == 2


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc: Linux only")
def test_the_ingress_and_controller_processes_have_not_loaded_torch(server: Server) -> None:
    server.stream({"max_tokens": 4})
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            title, maps = (process / "cmdline").read_text(), (process / "maps").read_text()
        except OSError:
            continue
        for part in ("Ingress", "ControllerServer", "LoadController", "TargetWorker"):
            if (APP in title and f":{part}" in title) or f"ray::{part}" in title:
                found[part] = "libtorch" in maps
    assert found == {"Ingress": False, "ControllerServer": False, "LoadController": False, "TargetWorker": True}


def test_clients_that_leave_free_the_engine_within_two_seconds(server: Server) -> None:
    async def leave(index: int) -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            body = {**LONG, **NO_EOS, "stream": index % 2 == 0}
            try:
                async with asyncio.timeout(0.05 + 0.03 * index):
                    await client.post(f"{server.url}/v1/completions", json=body)
            except TimeoutError:
                return

    async def main() -> None:
        await asyncio.gather(*(leave(index) for index in range(16)))

    before = server.totals()["aborted"]
    asyncio.run(main())
    eventually(lambda: server.totals()["running"] + server.totals()["waiting"] == 0, 2.0)
    assert server.totals()["aborted"] > before
    assert server.get("/stats").json()["answering"] == 0


@pytest.mark.parametrize(
    "part", ["DraftWorker-", "LoadController", "TargetWorker-", "#TargetServer#", "#DrafterServer#"]
)
def test_whatever_is_killed_every_stream_ends_whole(server: Server, in_process: list[str], part: str) -> None:
    eventually(lambda: server.get("/ready").status_code == 200, 60)
    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(server.stream, body) for body in [LONG, SEEDED] * 4]
        eventually(lambda: server.totals()["running"] == 8, 20)
        killed = kill_actor(part)
        assert [stream.result() for stream in streams] == in_process * 4
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    assert killed not in names or part == "LoadController"
    eventually(lambda: server.get("/ready").status_code == 200, 60)
    eventually(lambda: (server.get("/stats").json()["controller"] or {}).get("leases"), 30)


def test_an_application_that_is_deleted_leaves_no_actor_and_no_placement_group(server: Server) -> None:
    serve.delete(APP)
    parts = ("TargetWorker", "DraftWorker", "LoadController")
    eventually(
        lambda: (
            not [
                actor["name"]
                for actor in ray.util.list_named_actors(all_namespaces=True)
                if any(f"{APP}/{part}" in actor["name"] for part in parts)
            ]
        ),
        20,
    )
    states = [group["state"] for group in ray.util.placement_group_table().values()]
    assert set(states) == {"REMOVED"}
