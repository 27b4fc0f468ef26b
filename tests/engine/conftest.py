"""A tiny target, and one way to run requests through a whole engine in this process."""

import asyncio
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dspark_ray.config import AppConfig
from dspark_ray.engine.engine import Engine
from dspark_ray.engine.local_executor import LocalExecutor
from dspark_ray.request import GenerationChunk, GenerationRequest
from tests.engine.harness import Run, collect


@pytest.fixture(scope="session")
def tiny_target(fixtures_dir: Path) -> str:
    return str(fixtures_dir / "target")


@pytest.fixture(scope="session")
def make_config(fixtures_dir: Path, tiny_target: str) -> Callable[..., AppConfig]:
    """Configuration for the tiny target: `kind` of drafter, `policy`, and overrides of the engine section."""

    def make(kind: str = "dspark", policy: str = "adaptive", folder: str | None = None, **engine: object) -> AppConfig:
        model = {"dspark": "draft_vanilla", "draft_model": "target"}.get(kind, f"draft_{kind}")
        if kind in ("ngram", "none"):
            model = None
        path = folder or (str(fixtures_dir / model) if model else None)
        return AppConfig.model_validate(
            {
                "target": {"model": tiny_target, "dtype": "float32", "device": "cpu", "num_threads": 1},
                "drafter": {"kind": kind, "model": path, "dtype": "float32", "device": "cpu"},
                "verification": {"policy": policy, "static_len": 3, "cache_cost_table": False},
                "engine": {"page_size": 4, "num_pages": 400, "max_num_seqs": 16, **engine},
            }
        )

    return make


@pytest.fixture(scope="session")
def run_requests() -> Run:
    """Run all requests at once through one engine and return each one's chunks."""

    def run(config: AppConfig, requests: Sequence[GenerationRequest]) -> dict[str, list[GenerationChunk]]:
        async def main() -> dict[str, list[GenerationChunk]]:
            engine = Engine(config, LocalExecutor(config), config.target.model)
            await engine.start()
            try:
                results = await asyncio.gather(*(collect(engine, request) for request in requests))
            finally:
                await engine.close()
            return dict(zip((request.request_id for request in requests), results, strict=True))

        return asyncio.run(main())

    return run


@pytest.fixture(scope="session")
def reference_generate(tiny_target: str) -> Callable[[tuple[int, ...], int], list[int]]:
    """transformers' own greedy generate() on the tiny target, without EOS."""
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()

    @functools.cache
    def generate(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
        ids = torch.tensor([list(prompt)])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return out[0, len(prompt) :].tolist()

    return generate
