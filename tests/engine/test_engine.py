"""The whole engine in one process: every drafter and policy gives the plain model's tokens, in good and bad weather."""

import asyncio
import gc
from collections.abc import Callable

import numpy as np
import pytest

from dspark_ray.config import AppConfig
from dspark_ray.engine.engine import Engine
from dspark_ray.engine.local_executor import LocalExecutor
from dspark_ray.errors import QueueFullError, RequestError
from dspark_ray.models.attention import KVCache
from dspark_ray.request import GenerationChunk, GenerationRequest, SamplingParams
from tests.engine.harness import Run, collect, tokens

KINDS = ["dspark", "dflash", "autoregressive", "draft_model", "ngram", "none"]
POLICIES = ["adaptive", "algorithm1", "static", "threshold", "none"]
MakeConfig = Callable[..., AppConfig]
Generate = Callable[[tuple[int, ...], int], list[int]]


def prompts(count: int, vocab: int = 60) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(5)
    return [tuple(rng.integers(0, vocab, size=int(rng.integers(1, 40))).tolist()) for _ in range(count)]


def greedy(max_tokens: int = 24, **params: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **params)  # type: ignore[arg-type]


def requests(sampling: SamplingParams, count: int = 8) -> list[GenerationRequest]:
    return [GenerationRequest(f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts(count))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_output_equals_generate_for_every_drafter_and_policy(
    kind: str, policy: str, make_config: MakeConfig, run_requests: Run, reference_generate: Generate
) -> None:
    together = requests(greedy())
    results = run_requests(make_config(kind, policy), together)
    for request in together:
        assert tokens(results[request.request_id]) == reference_generate(request.prompt_token_ids, 24)


def test_alone_and_together_requests_get_the_same_tokens(make_config: MakeConfig, run_requests: Run) -> None:
    together = requests(greedy())
    results = run_requests(make_config(), together)
    for request in together[:3]:
        assert tokens(run_requests(make_config(), [request])[request.request_id]) == tokens(results[request.request_id])


@pytest.mark.parametrize("kind", KINDS)
def test_seeded_sampling_gives_the_same_tokens_with_any_drafter_and_load(
    kind: str, make_config: MakeConfig, run_requests: Run
) -> None:
    sampling = [
        SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=-3, top_p=0.9, top_k=20, min_p=0.02, max_tokens=24, ignore_eos=True),
    ]
    for params in sampling:
        plain = run_requests(make_config("none"), requests(params))
        drafted = run_requests(make_config(kind, "static"), requests(params))
        alone = run_requests(make_config(kind), requests(params, count=1))
        assert {name: tokens(chunks) for name, chunks in drafted.items()} == {
            name: tokens(chunks) for name, chunks in plain.items()
        }
        assert tokens(alone["r0"]) == tokens(plain["r0"])


def test_other_seeds_give_other_texts(make_config: MakeConfig, run_requests: Run) -> None:
    texts = {
        tuple(tokens(run_requests(make_config("ngram"), requests(SamplingParams(seed=seed), 1))["r0"]))
        for seed in (1, 2, 3)
    }
    assert len(texts) == 3


def test_unseeded_sampling_varies_between_requests(make_config: MakeConfig, run_requests: Run) -> None:
    same = [GenerationRequest(f"r{i}", (1, 2, 3), SamplingParams(max_tokens=12)) for i in range(20)]
    results = run_requests(make_config("dspark", "static"), same)
    assert len({tuple(tokens(chunks)) for chunks in results.values()}) > 15


def test_a_target_that_drafts_for_itself_is_accepted_whole(
    make_config: MakeConfig, run_requests: Run, reference_generate: Generate
) -> None:
    results = run_requests(make_config("draft_model", "static"), requests(greedy(), 1))
    chunks = results["r0"]
    full = [chunk for chunk in chunks[1:-1] if chunk.counts.admitted]
    assert full
    assert all(chunk.counts.accepted == chunk.counts.admitted == len(chunk.token_ids) - 1 for chunk in full)
    assert tokens(chunks) == reference_generate(requests(greedy(), 1)[0].prompt_token_ids, 24)


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 9, 20])
def test_exactly_max_tokens_come_out(limit: int, make_config: MakeConfig, run_requests: Run) -> None:
    chunks = run_requests(make_config("draft_model", "static"), requests(greedy(limit), 1))["r0"]
    assert len(tokens(chunks)) == limit
    assert chunks[-1].finish_reason == "length"


def test_a_stop_id_in_the_middle_of_an_accepted_block_ends_the_request(
    make_config: MakeConfig, run_requests: Run, reference_generate: Generate
) -> None:
    prompt = prompts(1)[0]
    plain = reference_generate(prompt, 24)
    for stop in sorted(set(plain[:10])):
        request = GenerationRequest("r", prompt, greedy(stop_token_ids=(stop,)))
        chunks = run_requests(make_config("draft_model", "static"), [request])["r"]
        assert tokens(chunks) == plain[: plain.index(stop) + 1]
        assert chunks[-1].finish_reason == "stop"


def test_a_tiny_pool_preempts_and_still_gives_the_same_tokens(
    make_config: MakeConfig, run_requests: Run, reference_generate: Generate
) -> None:
    together = requests(greedy())
    results = run_requests(make_config(num_pages=24, max_prefill_tokens=16), together)
    for request in together:
        assert tokens(results[request.request_id]) == reference_generate(request.prompt_token_ids, 24)


def test_small_prefill_chunks_beside_verification_change_nothing(
    make_config: MakeConfig, run_requests: Run, reference_generate: Generate
) -> None:
    together = requests(greedy())
    results = run_requests(make_config(max_prefill_tokens=5), together)
    for request in together:
        assert tokens(results[request.request_id]) == reference_generate(request.prompt_token_ids, 24)


def test_resuming_behind_emitted_tokens_gives_only_the_rest(
    make_config: MakeConfig, run_requests: Run, reference_generate: Generate
) -> None:
    prompt = prompts(1)[0]
    plain = reference_generate(prompt, 24)
    for cut in (1, 5, 23):
        request = GenerationRequest("r", prompt, greedy(), resumed_token_ids=tuple(plain[:cut]))
        assert tokens(run_requests(make_config(), [request])["r"]) == plain[cut:]


def test_per_request_speculation_switches(make_config: MakeConfig, run_requests: Run) -> None:
    prompt = prompts(1)[0]
    off = GenerationRequest("off", prompt, greedy(), speculation=False)
    two = GenerationRequest("two", prompt, greedy(), num_draft_tokens=2)
    results = run_requests(make_config("draft_model", "static"), [off, two])
    assert sum(chunk.counts.admitted for chunk in results["off"]) == 0
    assert max(chunk.counts.admitted for chunk in results["two"]) == 2
    assert tokens(results["off"]) == tokens(results["two"])


async def started(config: AppConfig) -> Engine:
    engine = Engine(config, LocalExecutor(config), config.target.model)
    await engine.start()
    return engine


def test_aborts_at_any_time_free_every_page_and_disturb_nobody(
    make_config: MakeConfig, reference_generate: Generate
) -> None:
    async def main() -> None:
        engine = await started(make_config(max_prefill_tokens=16))
        rng = np.random.default_rng(0)
        keeper = asyncio.create_task(collect(engine, GenerationRequest("keep", prompts(1)[0], greedy(40))))

        async def leave_early(name: str, prompt: tuple[int, ...], steps: int) -> None:
            async for _ in engine.generate(GenerationRequest(name, prompt, greedy(100 - len(prompt)))):
                steps -= 1
                if steps <= 0:
                    return

        async def cancel_later(name: str, prompt: tuple[int, ...]) -> None:
            task = asyncio.create_task(collect(engine, GenerationRequest(name, prompt, greedy(50))))
            await asyncio.sleep(float(rng.uniform(0, 0.02)))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        many = prompts(60)
        await asyncio.gather(
            *(leave_early(f"e{i}", prompt, int(rng.integers(1, 6))) for i, prompt in enumerate(many[:30])),
            *(cancel_later(f"c{i}", prompt) for i, prompt in enumerate(many[30:])),
        )
        kept = await keeper
        stats = engine.stats()
        await engine.close()
        assert tokens(kept) == reference_generate(prompts(1)[0], 40)
        assert stats["pages"]["free"] == stats["pages"]["total"]
        assert (stats["running"], stats["waiting"]) == (0, 0)

    asyncio.run(main())


def test_a_full_queue_refuses_and_bad_requests_name_the_field(make_config: MakeConfig) -> None:
    async def main() -> None:
        engine = await started(make_config(max_queued=1))
        first = asyncio.create_task(collect(engine, GenerationRequest("a", (1, 2), greedy(60))))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="limit 1"):
            await collect(engine, GenerationRequest("b", (1, 2), greedy()))
        await first
        limit = engine.info.max_model_len
        bad: list[tuple[str, GenerationRequest]] = [
            ("prompt", GenerationRequest("x", (), greedy())),
            ("prompt", GenerationRequest("x", (10**6,), greedy())),
            ("prompt", GenerationRequest("x", (1,) * limit, greedy(1))),
            ("max_tokens", GenerationRequest("x", (1,) * (limit - 1), greedy(2))),
            ("stop_token_ids", GenerationRequest("x", (1,), greedy(stop_token_ids=(-1,)))),
        ]
        for param, request in bad:
            with pytest.raises(RequestError) as error:
                await collect(engine, request)
            assert error.value.param == param
        exact = await collect(engine, GenerationRequest("y", (1,) * (limit - 1), greedy(1)))
        assert len(tokens(exact)) == 1
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("short", range(1, 10))
def test_generation_to_the_very_end_of_the_context(
    short: int, make_config: MakeConfig, run_requests: Run, reference_generate: Generate
) -> None:
    config = make_config("draft_model", "static")
    config = config.model_copy(update={"target": config.target.model_copy(update={"max_model_len": 48})})
    prompt = (prompts(3)[2] * 10)[: 48 - short]
    chunks = run_requests(config, [GenerationRequest("r", prompt, greedy(short))])["r"]
    assert tokens(chunks) == reference_generate(prompt, short)


def test_counts_add_up(make_config: MakeConfig, run_requests: Run) -> None:
    async def main() -> tuple[dict[str, object], list[list[GenerationChunk]]]:
        engine = await started(make_config())
        results = await asyncio.gather(*(collect(engine, request) for request in requests(greedy())))
        stats = engine.stats()
        await engine.close()
        return stats, list(results)

    stats, results = asyncio.run(main())
    chunks = [chunk for result in results for chunk in result]
    for name in ("drafted", "admitted", "accepted", "emitted"):
        assert stats[name] == sum(getattr(chunk.counts, name) for chunk in chunks)
    assert stats["emitted"] == sum(len(chunk.token_ids) for chunk in chunks)
    assert stats["accepted"] == sum(stats["accepted_at_position"])  # type: ignore[call-overload]


def test_a_closed_engine_frees_its_weights_and_pages(make_config: MakeConfig, run_requests: Run) -> None:
    def live_caches() -> int:
        return sum(isinstance(thing, KVCache) for thing in gc.get_objects())

    before = live_caches()
    run_requests(make_config(), requests(greedy(4), 1))
    assert live_caches() <= before
