"""Small helpers of the worker tests."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark_ray.engine.engine import Engine
from dspark_ray.request import GenerationRequest, SamplingParams
from dspark_ray.workers.ray_executor import RayExecutor

APP = "test-app"


@dataclass(frozen=True, slots=True)
class RayEngine:
    """A running engine over Ray, and the actors to be unkind to."""

    engine: Engine
    executor: RayExecutor
    drafters: dict[str, Any]


def make_requests(count: int, max_tokens: int = 24, vocab: int = 60, **params: Any) -> list[GenerationRequest]:
    """Random prompts of 1 to 30 tokens, greedy unless told otherwise, EOS ignored."""
    rng = np.random.default_rng(3)
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **params})
    prompts = [tuple(rng.integers(0, vocab, size=size).tolist()) for size in rng.integers(1, 30, size=count)]
    return [GenerationRequest(f"r{index}", prompt, sampling) for index, prompt in enumerate(prompts)]


async def collect(engine: Engine, request: GenerationRequest) -> list[int]:
    return [token async for chunk in engine.generate(request) for token in chunk.token_ids]


async def collect_all(engine: Engine, requests: Sequence[GenerationRequest]) -> dict[str, list[int]]:
    results = await asyncio.gather(*(collect(engine, request) for request in requests))
    return dict(zip((request.request_id for request in requests), results, strict=True))


async def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Let the event loop run until the condition holds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)
