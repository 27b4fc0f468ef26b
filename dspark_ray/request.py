"""What goes into the engine and what comes out: immutable requests and streamed chunks.

Knows nothing of tensors, Ray or HTTP; every floor may import it, and every object here pickles.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from dspark_ray.errors import RequestError

VerificationMode = Literal["auto", "rejection", "coupled"]
FinishReason = Literal["stop", "length", "abort"]

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop.

    temperature 0 is greedy. top_k 0 or -1, top_p 1 and min_p 0 are off. `verification` picks the exact mode
    (DESIGN: `auto` is coupled when a seed is given, rejection otherwise).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    verification: VerificationMode = "auto"

    def __post_init__(self) -> None:
        check_range("temperature", self.temperature, 0.0, 100.0)
        check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_range("min_p", self.min_p, 0.0, 1.0)
        if self.top_k < -1:
            raise RequestError(f"top_k must be -1 (off), 0 (off) or positive, got {self.top_k}", param="top_k")
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, got {self.max_tokens}", param="max_tokens")
        if self.seed is not None and not -MAX_SEED <= self.seed <= MAX_SEED:
            raise RequestError(f"seed must fit in 64 bits, got {self.seed}", param="seed")
        if any(not text for text in self.stop):
            raise RequestError("stop must not contain an empty string", param="stop")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def coupled(self) -> bool:
        """Whether noise is shared with the drafter (exact and reproducible) instead of rejection sampling."""
        if self.verification == "auto":
            return self.seed is not None
        return self.verification == "coupled"


def check_range(param: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    """Raise RequestError unless `value` is finite and in [low, high] (or (low, high] if `open_low`)."""
    inside = math.isfinite(value) and (low < value if open_low else low <= value) and value <= high
    if not inside:
        bracket = "(" if open_low else "["
        raise RequestError(f"{param} must be in {bracket}{low:g}, {high:g}], got {value}", param=param)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to continue. `n` > 1 of a client becomes several of these."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    speculation: bool = True
    num_draft_tokens: int | None = None  # at most this many drafts a step for this request; None: the configured number
    resumed_token_ids: tuple[int, ...] = ()  # output another replica emitted already: counted, replayed, not sent again


@dataclass(frozen=True, slots=True)
class SpeculationCounts:
    """Draft tokens proposed, sent to verification, accepted; and tokens emitted (accepted + one a round)."""

    drafted: int = 0
    admitted: int = 0
    accepted: int = 0
    emitted: int = 0

    def __add__(self, other: "SpeculationCounts") -> "SpeculationCounts":
        return SpeculationCounts(
            self.drafted + other.drafted,
            self.admitted + other.admitted,
            self.accepted + other.accepted,
            self.emitted + other.emitted,
        )


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """What one engine step added to one request. `text` never shows a partial stop string or code point."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int = 0
