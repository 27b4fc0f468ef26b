"""Small helpers of the engine tests."""

from collections.abc import Callable, Sequence

from dspark_ray.config import AppConfig
from dspark_ray.engine.engine import Engine
from dspark_ray.request import GenerationChunk, GenerationRequest

Run = Callable[[AppConfig, Sequence[GenerationRequest]], dict[str, list[GenerationChunk]]]


async def collect(engine: Engine, request: GenerationRequest) -> list[GenerationChunk]:
    return [chunk async for chunk in engine.generate(request)]


def tokens(chunks: list[GenerationChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]
