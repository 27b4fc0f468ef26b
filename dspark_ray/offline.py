"""Engines in this process and requests run to their end: for the command line, benchmarks and the exactness check.

Knows no Ray: an executor of another kind is passed in.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from dspark_ray.algorithm.cost_table import CostTable
from dspark_ray.config import AppConfig
from dspark_ray.engine.engine import Engine
from dspark_ray.engine.executor import Executor
from dspark_ray.engine.local_executor import LocalExecutor
from dspark_ray.models.resolve import resolve_model
from dspark_ray.request import FinishReason, GenerationChunk, GenerationRequest, SpeculationCounts


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished request. `seconds` runs from submission; `first_seconds` to its first token."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    counts: SpeculationCounts
    finish_reason: FinishReason | None
    num_rounds: int  # decode rounds: chunks with tokens, without the one that prefill ended in
    seconds: float
    first_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed behind the first token (0 where nothing follows it)."""
        later = len(self.token_ids) - 1
        return later / (self.seconds - self.first_seconds) if later > 0 else 0.0

    @property
    def accepted_length(self) -> float:
        """Mean tokens a decode round, bonus included (the paper's accepted length; 1.0 is plain decoding)."""
        return (len(self.token_ids) - 1) / self.num_rounds if self.num_rounds else 1.0


@asynccontextmanager
async def open_engine(
    config: AppConfig, executor: Executor | None = None, cost_table: CostTable | None = None
) -> AsyncIterator[Engine]:
    """A started engine, in this process unless an executor is given; closed on leaving.

    The cost table is the one given, else the engine finds or profiles one where the policy needs it.
    """
    folder = await asyncio.to_thread(resolve_model, config.target.model)
    engine = Engine(config, executor or LocalExecutor(config), str(folder))
    try:
        await engine.start(cost_table)
        yield engine
    finally:
        await engine.close()


async def complete(
    engine: Engine, request: GenerationRequest, on_chunk: Callable[[GenerationChunk], None] | None = None
) -> Completion:
    """Run one request to its end; `on_chunk` sees every chunk as it comes."""
    started = time.perf_counter()
    first_seconds = 0.0
    chunks: list[GenerationChunk] = []
    async for chunk in engine.generate(request):
        if not first_seconds and chunk.token_ids:
            first_seconds = time.perf_counter() - started
        chunks.append(chunk)
        if on_chunk is not None:
            on_chunk(chunk)
    return Completion(
        request.request_id,
        "".join(chunk.text for chunk in chunks),
        tuple(token for chunk in chunks for token in chunk.token_ids),
        sum((chunk.counts for chunk in chunks), SpeculationCounts()),
        chunks[-1].finish_reason if chunks else None,
        max(0, sum(bool(chunk.token_ids) for chunk in chunks) - 1),
        time.perf_counter() - started,
        first_seconds,
    )


async def complete_all(
    engine: Engine,
    requests: Sequence[GenerationRequest],
    concurrency: int,
    on_done: Callable[[Completion], None] | None = None,
) -> list[Completion]:
    """Run requests, at most `concurrency` at a time; results in the order of `requests`."""
    slots = asyncio.Semaphore(concurrency)

    async def run(request: GenerationRequest) -> Completion:
        async with slots:
            completion = await complete(engine, request)
        if on_done is not None:
            on_done(completion)
        return completion

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(request)) for request in requests]
    return [task.result() for task in tasks]


def load_tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def chat_prompt(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Token ids of one user message under the model's chat template, or of the bare text where there is none."""
    if not tokenizer.chat_template:
        return tuple(tokenizer.encode(text))
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return tuple(rendered["input_ids"])
