"""A Backend over an engine in this process: what a TargetServer replica wraps, and the server without Ray."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

from deployments.backend import ModelCard, summary
from deployments.errors import UnavailableError
from deployments.tokenization import read_tokenizer_files
from dspark_ray.engine.engine import Engine
from dspark_ray.errors import EngineDeadError
from dspark_ray.request import GenerationChunk, GenerationRequest


class EngineBackend:
    """A started engine and the folder its model came from."""

    def __init__(self, engine: Engine, name: str, folder: Path) -> None:
        self._engine = engine
        self._card = ModelCard(
            name=name,
            max_model_len=engine.info.max_model_len,
            vocab_size=engine.info.vocab_size,
            num_draft_tokens=engine.info.num_draft_tokens,
            tokenizer_files=read_tokenizer_files(folder),
        )

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        stream = cast(AsyncGenerator[GenerationChunk, None], self._engine.generate(request))
        # Closing at once, not when garbage is collected: that is what frees the request's pages.
        async with aclosing(stream):
            async for chunk in stream:
                yield chunk

    async def card(self) -> ModelCard:
        return self._card

    async def check_ready(self) -> None:
        try:
            self._engine.check_health()
        except EngineDeadError as error:
            raise UnavailableError(str(error)) from error

    async def stats(self) -> dict[str, Any]:
        return summary([self._engine.stats()], None)
