"""`dspark-ray generate`: one prompt in this process, accepted drafts in colour, and the speed of plain decoding."""

import asyncio
from argparse import Namespace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tokenizers.decoders import DecodeStream
from transformers.utils.logging import disable_progress_bar

from dspark_ray.cli.arguments import config_from
from dspark_ray.config import AppConfig
from dspark_ray.engine.engine import Engine
from dspark_ray.models.resolve import resolve_model
from dspark_ray.offline import Completion, chat_prompt, complete, load_tokenizer, open_engine
from dspark_ray.request import GenerationChunk, GenerationRequest, SamplingParams

WARM_UP_TOKENS = 8


def run(args: Namespace) -> int:
    disable_progress_bar()  # transformers' own, of loading weights
    config = config_from(args)
    sampling = SamplingParams(temperature=args.temperature, seed=args.seed, max_tokens=args.max_tokens)
    tokenizer = load_tokenizer(resolve_model(config.target.model))
    console = Console(highlight=False)
    prompt = chat_prompt(tokenizer, args.prompt)
    asyncio.run(_generate(config, prompt, sampling, tokenizer, console, args))
    return 0


async def _generate(
    config: AppConfig,
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    tokenizer: Any,
    console: Console,
    args: Namespace,
) -> None:
    style = "underline" if args.no_color else "bold green"
    console.print(f"[dim]loading {config.target.model} ...[/dim]")
    async with open_engine(config) as engine:
        if not args.no_compare:
            await _warm_up(engine, prompt)
        printer = ChunkPrinter(console, tokenizer, style)
        drafted = await complete(engine, GenerationRequest("with-drafts", prompt, sampling), printer.show)
        console.print()
        plain = None
        if not args.no_compare:
            plain = await complete(engine, GenerationRequest("plain", prompt, sampling, speculation=False))
    _report(console, config, sampling, drafted, plain)


async def _warm_up(engine: Engine, prompt: tuple[int, ...]) -> None:
    """First steps pay for lazily built kernels; the comparison should not."""
    sampling = SamplingParams(temperature=0.0, max_tokens=WARM_UP_TOKENS, ignore_eos=True)
    await complete(engine, GenerationRequest("warm-up", prompt, sampling))


class ChunkPrinter:
    """Prints chunks as they come, accepted drafts in a style of their own; a chunk's last token is the target's."""

    def __init__(self, console: Console, tokenizer: Any, accepted_style: str) -> None:
        self._console, self._style = console, accepted_style
        self._tokenizer = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def show(self, chunk: GenerationChunk) -> None:
        line = Text()
        for index, token in enumerate(chunk.token_ids):
            piece = self._stream.step(self._tokenizer, token)
            if piece:  # None while a code point is incomplete
                line.append(piece, style=self._style if index < chunk.counts.accepted else "")
        self._console.print(line, end="", soft_wrap=True)


def _report(
    console: Console, config: AppConfig, sampling: SamplingParams, drafted: Completion, plain: Completion | None
) -> None:
    counts = drafted.counts
    table = Table("", "tokens", "tokens/s", "accepted length")
    table.add_row("with drafts", *_row(drafted))
    if plain is not None:
        table.add_row("plain", *_row(plain))
    console.print(table)
    console.print(
        f"drafter {config.drafter.kind}, policy {config.verification.policy}: {counts.drafted} drafted, "
        f"{counts.admitted} verified, {counts.accepted} accepted, {counts.emitted} emitted"
    )
    if plain is not None and (sampling.greedy or sampling.coupled):
        same = drafted.token_ids == plain.token_ids
        console.print(f"output with and without drafts: {'the same tokens' if same else 'DIFFERENT TOKENS'}")
    if plain is not None and plain.tokens_per_second:
        console.print(f"speed-up: {drafted.tokens_per_second / plain.tokens_per_second:.2f}x")


def _row(completion: Completion) -> tuple[str, str, str]:
    return (
        str(len(completion.token_ids)),
        f"{completion.tokens_per_second:.1f}",
        f"{completion.accepted_length:.2f}",
    )
