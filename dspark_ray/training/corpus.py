"""The corpus stage: prompts answered by the target itself, through the engine, batched, kept as shards.

A finished shard is never made again; a later run goes on behind it. Prompts are the files' first, then user turns that
the target writes (the chat template's user header is all it is given).
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, get_args

import numpy as np

from dspark_ray.config import AppConfig
from dspark_ray.engine.engine import Engine
from dspark_ray.engine.executor import Executor
from dspark_ray.engine.local_executor import LocalExecutor
from dspark_ray.models.files import replace_text
from dspark_ray.models.resolve import resolve_model
from dspark_ray.offline import Completion, complete, load_tokenizer, open_engine
from dspark_ray.request import GenerationRequest, SamplingParams
from dspark_ray.training.config import CorpusConfig, TeacherConfig
from dspark_ray.training.prompts import (
    ChatTemplate,
    PromptFilter,
    held_out_fingerprints,
    is_validation,
    read_prompt_rows,
)
from dspark_ray.training.sequences import Split, TrainingSequence, num_shards, read_shards, shard_path, write_shard

PROVENANCE_FILE = "corpus.json"
PAGE_SIZE = 16
REPORT_SECONDS = 10.0


@dataclass
class CorpusCounts:
    """What a corpus holds, over all runs on its folder. `skipped` counts by reason; `seconds` of generation."""

    sequences: Counter[str] = field(default_factory=Counter)  # by split
    reply_tokens: Counter[str] = field(default_factory=Counter)  # by split
    skipped: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def add(self, split: Split, sequence: TrainingSequence) -> None:
        self.sequences[split] += 1
        self.reply_tokens[split] += len(sequence.token_ids) - sequence.reply_start


Report = Callable[[CorpusCounts], None]


@dataclass(frozen=True, slots=True)
class TargetPool:
    """The engines that write the corpus; the requests are spread over them."""

    new_executor: Callable[[AppConfig], Executor] = LocalExecutor
    num_engines: int = 1


def make_corpus(
    teacher: TeacherConfig, config: CorpusConfig, folder: Path, report: Report, pool: TargetPool | None = None
) -> CorpusCounts:
    """Fill `folder` up to `num_reply_tokens`; `report` is called every few seconds and at the end.

    Ends early where the files are used up and nothing is synthesised; interrupted, it keeps what is finished. Raises
    ConfigError for unreadable files. Args: pool: default: one engine in this process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return asyncio.run(_CorpusRun(teacher, config, folder, report).run(pool or TargetPool()))


class _CorpusRun:
    def __init__(self, teacher: TeacherConfig, config: CorpusConfig, folder: Path, report: Report) -> None:
        self._teacher, self._config, self._folder, self._report = teacher, config, folder, report
        self._template = ChatTemplate(load_tokenizer(resolve_model(teacher.model)))
        self._counts, seen = _resume(folder, self._template)
        held_out = held_out_fingerprints(config.held_out, self._template)
        self._filter = PromptFilter(held_out, seen, config.max_prompt_tokens, self._counts.skipped)
        self._rows = read_prompt_rows(config.prompts, self._counts.skipped)
        self._buffers: dict[Split, list[TrainingSequence]] = {split: [] for split in get_args(Split)}
        self._numbers = count(self._counts.sequences.total())
        self._last_report = time.monotonic()
        self._began = time.monotonic() - self._counts.seconds

    async def run(self, pool: TargetPool) -> CorpusCounts:
        try:
            if not self._done:
                await self._generate(pool)
        finally:
            self._flush()
        self._report(self._counts)
        return self._counts

    async def _generate(self, pool: TargetPool) -> None:
        config = _engine_config(self._teacher, self._config)
        async with AsyncExitStack() as stack:
            engines = [
                await stack.enter_async_context(open_engine(config, pool.new_executor(config)))
                for _ in range(pool.num_engines)
            ]
            async with asyncio.TaskGroup() as group:
                for index in range(self._config.concurrency * pool.num_engines):
                    group.create_task(self._fill(engines[index % pool.num_engines]))

    @property
    def _done(self) -> bool:
        return self._counts.reply_tokens.total() >= self._config.num_reply_tokens

    async def _fill(self, engine: Engine) -> None:
        """One prompt and its reply after another; so many of these run together."""
        while not self._done:
            number = next(self._numbers)
            rng = np.random.default_rng((self._config.seed, number))
            text = next(self._rows, None)
            if text is None:
                if not self._config.synthesise:
                    return
                text = await self._synthesise(engine, rng, number)
            if text is not None:
                await self._answer(engine, self._template.prompt(text), rng, number)

    async def _synthesise(self, engine: Engine, rng: np.random.Generator, number: int) -> str | None:
        """A user turn in the target's own words; None if it did not come to an end within a prompt's length."""
        config = self._config
        shares = np.array([pattern.share for pattern in config.turn_patterns])
        pattern = config.turn_patterns[rng.choice(len(shares), p=shares / shares.sum())]
        turn = await _ask(
            engine,
            f"turn-{number}",
            self._template.user_header(pattern.opening),
            SamplingParams(temperature=config.synthesis_temperature, max_tokens=config.max_prompt_tokens),
        )
        words = self._template.text(turn.token_ids, strip=False)
        if turn.finish_reason != "stop" or not words.strip():
            self._counts.skipped["synthesised turn empty or without an end"] += 1
            return None
        return pattern.opening + words.rstrip() + pattern.closing

    async def _answer(self, engine: Engine, prompt: tuple[int, ...], rng: np.random.Generator, number: int) -> None:
        config, key = self._config, self._template.fingerprint(prompt)
        if not self._filter.admits(prompt, key):
            return
        split: Split = "validation" if is_validation(key, config.validation_share) else "train"
        for index, temperature in enumerate(_draw_temperatures(config, rng)):
            params = SamplingParams(temperature=temperature, max_tokens=config.max_reply_tokens)
            reply = (await _ask(engine, f"reply-{number}-{index}", prompt, params)).token_ids
            if len(reply) < config.min_reply_tokens:
                self._counts.skipped["reply too short"] += 1
            else:
                self._keep(split, TrainingSequence((*prompt, *reply), len(prompt), temperature))

    def _keep(self, split: Split, sequence: TrainingSequence) -> None:
        self._counts.add(split, sequence)
        self._counts.seconds = time.monotonic() - self._began
        self._buffers[split].append(sequence)
        if sum(map(len, self._buffers.values())) >= self._config.shard_sequences:
            self._flush()
        if time.monotonic() - self._last_report > REPORT_SECONDS:
            self._last_report = time.monotonic()
            self._report(self._counts)

    def _flush(self) -> None:
        """Write what is buffered as the next shard of each split, then what the corpus is."""
        for split, sequences in self._buffers.items():
            if sequences:
                write_shard(shard_path(self._folder, split, num_shards(self._folder, split)), sequences)
            self._buffers[split] = []
        _write_provenance(self._folder / PROVENANCE_FILE, self._teacher, self._config, self._counts)


def _draw_temperatures(config: CorpusConfig, rng: np.random.Generator) -> list[float]:
    """One a reply; a second greedy reply would only repeat the first."""
    values, shares = (np.array(column) for column in zip(*config.temperatures, strict=True))
    drawn: list[float] = []
    for _ in range(config.replies_per_prompt):
        usable = shares * ~((values == 0.0) & (0.0 in drawn))
        if usable.any():
            drawn.append(float(rng.choice(values, p=usable / usable.sum())))
    return drawn


async def _ask(engine: Engine, request_id: str, prompt: tuple[int, ...], params: SamplingParams) -> Completion:
    return await complete(engine, GenerationRequest(request_id, prompt, params))


def _engine_config(teacher: TeacherConfig, config: CorpusConfig) -> AppConfig:
    """Large batches of plain decoding; nobody compares these texts bit for bit, so rows need not be invariant."""
    pages_each = -(-(config.max_prompt_tokens + config.max_reply_tokens) // PAGE_SIZE) + 1
    return AppConfig.model_validate(
        {
            "target.model": teacher.model,
            "target.dtype": teacher.dtype,
            "target.device": teacher.device,
            "target.num_threads": config.num_threads,
            "target.row_invariant": False,
            "drafter.kind": "none",
            "verification.policy": "none",
            "engine.page_size": PAGE_SIZE,
            "engine.num_pages": config.concurrency * pages_each,
            "engine.max_num_seqs": config.concurrency,
            "engine.max_prefill_tokens": max(512, 8 * config.concurrency),
            "engine.max_queued": 2 * config.concurrency,
        }
    )


def _resume(folder: Path, template: ChatTemplate) -> tuple[CorpusCounts, set[int]]:
    """What earlier runs have left, and the fingerprints of the prompts they used."""
    counts, seen = CorpusCounts(), set[int]()
    for split in get_args(Split):
        for sequence in read_shards(folder, split):
            counts.add(split, sequence)
            seen.add(template.fingerprint(sequence.token_ids[: sequence.reply_start]))
    if (path := folder / PROVENANCE_FILE).is_file():
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        counts.skipped.update(data["skipped"])
        counts.seconds = float(data["seconds"])
    return counts, seen


def _write_provenance(path: Path, teacher: TeacherConfig, config: CorpusConfig, counts: CorpusCounts) -> None:
    content = {
        "model": teacher.model,
        "dtype": teacher.dtype,
        "sequences": dict(counts.sequences),
        "reply_tokens": dict(counts.reply_tokens),
        "skipped": dict(counts.skipped),
        "seconds": round(counts.seconds, 1),
        "config": config.model_dump(mode="json"),
    }
    replace_text(path, json.dumps(content, indent=2) + "\n")
