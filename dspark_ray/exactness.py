"""Compares the engine's tokens with transformers' generate(): greedy, and seeded with the shared noise (coupled mode).

The reference is the plain model run by transformers alone, without anything of the engine. Knows no Ray: whoever
calls gives the engine to compare.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, LogitsProcessorList

from dspark_ray.algorithm.noise import gumbel
from dspark_ray.engine.engine import Engine
from dspark_ray.errors import ConfigError
from dspark_ray.offline import Completion, chat_prompt, complete_all
from dspark_ray.request import GenerationRequest, SamplingParams, SpeculationCounts

Mode = Literal["greedy", "coupled"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; `source` is file name and line. In coupled mode its seed is the line number."""

    source: str
    seed: int
    token_ids: tuple[int, ...]

    def sampling(self, mode: Mode, max_tokens: int) -> SamplingParams:
        if mode == "greedy":
            return SamplingParams(temperature=0.0, max_tokens=max_tokens)
        return SamplingParams(temperature=1.0, seed=self.seed, max_tokens=max_tokens, verification="coupled")


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an output first leaves the reference, and how far apart the plain model holds the two tokens.

    `gap` is the reference token's score minus the score of the token got (logits; in coupled mode with the noise
    added); `top2_gap` that between the two best tokens. Equal where the token got is the second best.
    """

    source: str
    position: int
    expected: int | None  # None: the reference had ended
    got: int | None  # None: the output ended early
    gap: float
    top2_gap: float

    def is_tie(self, tie_gap: float) -> bool:
        return self.expected is not None and self.got is not None and abs(self.gap) <= tie_gap


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of all prompts through one engine."""

    mode: Mode
    concurrency: int
    cases: int
    differences: tuple[Difference, ...] = ()
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)

    @property
    def equal(self) -> int:
        return self.cases - len(self.differences)

    def num_ties(self, tie_gap: float) -> int:
        return sum(difference.is_tie(tie_gap) for difference in self.differences)

    def num_wrong(self, tie_gap: float) -> int:
        return len(self.differences) - self.num_ties(tie_gap)


class SharedNoise(LogitsProcessor):
    """Turns generate()'s argmax into a sample of the softmax at temperature 1: argmax(log p + g(seed, position, .))."""

    def __init__(self, seed: int) -> None:
        self._seed = torch.tensor([seed])

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # [1, T], [1, V]
        vocabulary = torch.arange(scores.shape[-1])
        noise = gumbel(self._seed, torch.tensor([input_ids.shape[1]]), vocabulary).to(scores.device)
        return torch.log_softmax(scores.float(), dim=-1) + noise


class Reference:
    """The plain model. Every prompt is generated once a mode and remembered."""

    def __init__(self, folder: Path, dtype: torch.dtype, max_tokens: int) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self._max_tokens = max_tokens
        self._outputs: dict[tuple[Mode, Prompt], tuple[int, ...]] = {}
        self._differences: dict[tuple[Mode, Prompt, tuple[int, ...]], Difference | None] = {}

    def output(self, prompt: Prompt, mode: Mode) -> tuple[int, ...]:
        if (mode, prompt) not in self._outputs:
            self._outputs[mode, prompt] = self._generate(prompt, mode)
        return self._outputs[mode, prompt]

    def compare(self, prompt: Prompt, mode: Mode, got: tuple[int, ...]) -> Difference | None:
        """None if `got` is the reference output."""
        key = (mode, prompt, got)
        if key not in self._differences:
            expected = self.output(prompt, mode)
            self._differences[key] = None if got == expected else self._difference(prompt, mode, expected, got)
        return self._differences[key]

    def _generate(self, prompt: Prompt, mode: Mode) -> tuple[int, ...]:
        input_ids = torch.tensor([prompt.token_ids])
        ends = self._model.generation_config.eos_token_id
        config = GenerationConfig(
            max_new_tokens=self._max_tokens, do_sample=False, eos_token_id=ends, pad_token_id=_first(ends)
        )
        output = self._model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            generation_config=config,
            logits_processor=self._processors(prompt, mode),
        )
        return tuple(output[0, len(prompt.token_ids) :].tolist())

    def _difference(self, prompt: Prompt, mode: Mode, expected: tuple[int, ...], got: tuple[int, ...]) -> Difference:
        position = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), None)
        if position is None:
            position = min(len(expected), len(got))
        scores = self.scores(prompt, mode, expected[:position])
        ours, theirs = _at(expected, position), _at(got, position)
        best = scores.topk(2).values
        gap = float("inf") if ours is None or theirs is None else float(scores[ours] - scores[theirs])
        return Difference(prompt.source, position, ours, theirs, gap, float(best[0] - best[1]))

    def scores(self, prompt: Prompt, mode: Mode, output: tuple[int, ...] = ()) -> torch.Tensor:  # [V]
        """What the next token behind prompt and `output` is the argmax of: logits, or log p + noise."""
        context = torch.tensor([[*prompt.token_ids, *output]])
        with torch.inference_mode():
            scores: torch.Tensor = self._model(context).logits[:, -1].float()
            for processor in self._processors(prompt, mode):
                scores = processor(context, scores)
        return scores[0]

    @staticmethod
    def _processors(prompt: Prompt, mode: Mode) -> LogitsProcessorList:
        return LogitsProcessorList([SharedNoise(prompt.seed)] if mode == "coupled" else [])


def read_prompts(files: Sequence[Path], limit: int | None, tokenizer: Any) -> list[Prompt]:
    """The first turn of the first `limit` lines (all: None) of each JSONL file, under the model's chat template."""
    prompts = []
    for file in files:
        lines = [line for line in file.read_text().splitlines() if line.strip()][:limit]
        for number, line in enumerate(lines, start=1):
            try:
                text = json.loads(line)["turns"][0]
            except (ValueError, KeyError, IndexError, TypeError) as error:
                raise ConfigError(
                    f'{file}:{number}: expected a line of {{"turns": ["..."]}}, got {line[:60]!r}'
                ) from error
            prompts.append(Prompt(f"{file.stem}:{number}", number, chat_prompt(tokenizer, text)))
    return prompts


async def check_engine(
    engine: Engine,
    reference: Reference,
    prompts: Sequence[Prompt],
    mode: Mode,
    concurrency: int,
    max_tokens: int,
    on_done: Callable[[Completion], None] | None = None,
) -> Outcome:
    """Run every prompt through the engine, `concurrency` at a time, and compare."""
    requests = [
        GenerationRequest(f"{mode}-{concurrency}-{prompt.source}", prompt.token_ids, prompt.sampling(mode, max_tokens))
        for prompt in prompts
    ]
    completions = await complete_all(engine, requests, concurrency, on_done)
    differences = [
        difference
        for prompt, completion in zip(prompts, completions, strict=True)
        if (difference := reference.compare(prompt, mode, completion.token_ids)) is not None
    ]
    counts = sum((completion.counts for completion in completions), SpeculationCounts())
    return Outcome(mode, concurrency, len(prompts), tuple(differences), counts)


def _at(tokens: tuple[int, ...], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None


def _first(token_ids: int | list[int] | None) -> int | None:
    return token_ids[0] if isinstance(token_ids, list) else token_ids
