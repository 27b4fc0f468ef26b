"""Whole greedy generations of the reference code, with the length accepted in every round, come out of the engine."""

import json
from pathlib import Path

import pytest

from dspark_ray.config import AppConfig
from dspark_ray.request import GenerationRequest, SamplingParams
from tests.engine.harness import Run, tokens


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("together", [False, True])
def test_reference_generations_and_their_accepted_lengths(
    head: str, together: bool, golden_dir: Path, run_requests: Run
) -> None:
    generations = json.loads((golden_dir / "golden.json").read_text())["heads"][head]["generations"]
    config = AppConfig.model_validate(
        {
            "target": {
                "model": str(golden_dir / "target_qwen3"),
                "dtype": "float32",
                "device": "cpu",
                "num_threads": 1,
            },
            "drafter": {"model": str(golden_dir / f"draft_{head}"), "dtype": "float32", "device": "cpu"},
            "verification": {"policy": "static", "static_len": 7},
            "engine": {"page_size": 8, "num_pages": 200},
        }
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)  # past the reference's 64: no cut rounds
    requests = [GenerationRequest(f"g{i}", tuple(g["prompt"]), sampling) for i, g in enumerate(generations)]
    batches = [requests] if together else [[request] for request in requests]
    results = {name: chunks for batch in batches for name, chunks in run_requests(config, batch).items()}
    for request, generation in zip(requests, generations, strict=True):
        chunks = results[request.request_id]
        assert tokens(chunks)[: len(generation["output"])] == generation["output"]
        lengths = [len(chunk.token_ids) for chunk in chunks[1:]]  # the first chunk is the end of prefill
        whole = generation["acceptance_lengths"][:-1]  # the reference cuts its last round at 64 tokens
        assert lengths[: len(whole)] == whole
