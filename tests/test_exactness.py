"""The exactness check can fail: it finds a wrong token, says how far off it is, and excuses nothing but ties."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from dspark_ray.config import AppConfig
from dspark_ray.errors import ConfigError
from dspark_ray.exactness import Difference, Mode, Outcome, Prompt, Reference, SharedNoise, check_engine, read_prompts
from dspark_ray.offline import open_engine

PROMPTS = [Prompt("a:1", 1, (3, 1, 4, 1, 5)), Prompt("a:2", 2, (9, 2, 6))]
MAX_TOKENS = 12
MODES: tuple[Mode, ...] = ("greedy", "coupled")


@pytest.fixture(scope="module")
def reference(fixtures_dir: Path) -> Reference:
    return Reference(fixtures_dir / "target", torch.float32, MAX_TOKENS)


def plain_config(fixtures_dir: Path) -> AppConfig:
    return AppConfig.model_validate(
        {
            "target": {"model": str(fixtures_dir / "target"), "dtype": "float32", "device": "cpu", "num_threads": 1},
            "drafter.kind": "ngram",
            "verification.policy": "static",
            "engine.num_pages": 64,
        }
    )


def check(fixtures_dir: Path, reference: Reference, prompts: list[Prompt], mode: Mode) -> Outcome:
    async def run() -> Outcome:
        async with open_engine(plain_config(fixtures_dir)) as engine:
            return await check_engine(engine, reference, prompts, mode, 2, MAX_TOKENS)

    return asyncio.run(run())


@pytest.mark.parametrize("mode", MODES)
def test_an_exact_engine_passes(mode: Mode, fixtures_dir: Path, reference: Reference) -> None:
    outcome = check(fixtures_dir, reference, PROMPTS, mode)
    assert (outcome.cases, outcome.equal, outcome.differences) == (2, 2, ())
    assert outcome.counts.emitted == sum(len(reference.output(prompt, mode)) for prompt in PROMPTS)


@pytest.mark.parametrize("mode", MODES)
def test_an_engine_of_another_model_fails(mode: Mode, fixtures_dir: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(fixtures_dir / "target")
    with torch.no_grad():
        model.model.norm.weight += torch.linspace(-1, 1, model.config.hidden_size)
    model.save_pretrained(tmp_path)
    other = Reference(tmp_path, torch.float32, MAX_TOKENS)
    outcome = check(fixtures_dir, other, PROMPTS, mode)
    assert outcome.num_wrong(1e-3) == 2


@pytest.mark.parametrize("mode", MODES)
def test_a_wrong_token_is_located_and_measured(mode: Mode, reference: Reference) -> None:
    expected = reference.output(PROMPTS[0], mode)
    changed = (expected[5] + 1) % 60
    difference = reference.compare(PROMPTS[0], mode, (*expected[:5], changed, *expected[6:]))
    assert difference is not None
    assert (difference.position, difference.expected, difference.got) == (5, expected[5], changed)
    assert difference.gap >= difference.top2_gap > 0
    assert difference.is_tie(difference.gap)
    assert not difference.is_tie(difference.gap * 0.99)


def test_an_output_that_ends_early_is_never_a_tie(reference: Reference) -> None:
    expected = reference.output(PROMPTS[0], "greedy")
    difference = reference.compare(PROMPTS[0], "greedy", expected[:4])
    assert difference is not None
    assert (difference.position, difference.expected, difference.got) == (4, expected[4], None)
    assert not difference.is_tie(1e9)


def test_another_seed_is_another_output(reference: Reference) -> None:
    other = replace(PROMPTS[0], seed=99)
    assert reference.output(PROMPTS[0], "coupled") != reference.output(other, "coupled")
    assert reference.output(PROMPTS[0], "greedy") == reference.output(other, "greedy")


def test_the_shared_noise_samples_the_softmax(reference: Reference) -> None:
    """First tokens of many seeds follow the model's own distribution."""
    logits = reference.scores(PROMPTS[0], "greedy")[None]
    context = torch.tensor([PROMPTS[0].token_ids])
    draws = torch.tensor([int(SharedNoise(seed)(context, logits).argmax()) for seed in range(4000)])
    counts, expected = torch.bincount(draws, minlength=logits.shape[1]), logits[0].double().softmax(-1) * len(draws)
    likely = expected >= 5
    observed = [*counts[likely].tolist(), int(counts[~likely].sum())]
    assert chisquare(observed, [*expected[likely].tolist(), float(expected[~likely].sum())]).pvalue > 1e-4


def test_outcomes_count_ties_and_wrong_ones_apart() -> None:
    tie, wrong = Difference("a", 0, 1, 2, 1e-5, 1e-5), Difference("b", 0, 1, 2, 0.5, 0.1)
    outcome = Outcome("greedy", 1, 5, (tie, wrong))
    assert (outcome.equal, outcome.num_ties(1e-3), outcome.num_wrong(1e-3)) == (3, 1, 1)


def test_a_line_without_turns_is_refused_by_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "hello"}\n')
    with pytest.raises(ConfigError, match=r"bad\.jsonl:1"):
        read_prompts([path], 3, tokenizer=None)
