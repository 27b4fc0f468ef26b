"""A request while it is served: its tokens, its pages, how far it is computed. Knows nothing of steps or batches."""

import asyncio
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from dspark_ray.engine.output import OutputProcessor
from dspark_ray.request import MAX_SEED, GenerationChunk, GenerationRequest


def noise_seed_of(request: GenerationRequest) -> int:
    """The client's seed, or a fresh random one, so that no two unseeded requests share noise."""
    seed = request.sampling.seed
    return seed if seed is not None else secrets.randbelow(MAX_SEED)


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens are prompt + output; the first `num_computed` have K/V in the pages. The last token of a decoding
    sequence is its anchor: emitted, not yet computed."""

    request: GenerationRequest
    output: OutputProcessor
    tokens: list[int]
    noise_seed: int
    chunks: "asyncio.Queue[GenerationChunk | Exception]"
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    finished: bool = False

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def decoding(self) -> bool:
        """Whether only the anchor is left to compute (a draft may follow it)."""
        return self.num_uncomputed == 1 and len(self.tokens) > self.num_prompt_tokens

    def advance(self, num_computed: int, new_tokens: list[int]) -> None:
        """Record a step: `num_computed` more tokens have K/V, `new_tokens` were emitted behind."""
        self.num_computed += num_computed
        self.tokens.extend(new_tokens)

    def reset(self) -> None:
        """Forget all K/V (preemption, lost group): everything is computed again; nothing emitted is lost."""
        self.num_computed = 0


class TokenHistories(Mapping[str, np.ndarray]):
    """The tokens of a step's requests before that step, made only when asked for: an executor needs them for the few
    requests whose drafter is new to them."""

    def __init__(self, sequences: dict[str, Sequence]) -> None:
        self._sequences = sequences

    def __getitem__(self, request_id: str) -> np.ndarray:  # [num_computed] int64
        sequence = self._sequences[request_id]
        return np.array(sequence.tokens[: sequence.num_computed], dtype=np.int64)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sequences)

    def __len__(self) -> int:
        return len(self._sequences)
