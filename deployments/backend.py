"""What the ingress needs of whoever generates: the seam between HTTP and engines, in process or over Serve.

Imports neither torch nor ray.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Protocol

from dspark_ray.request import GenerationChunk, GenerationRequest


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a client-facing process must know of the loaded model; pickles, so that it can come from another node."""

    name: str
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int
    num_draft_tokens: int
    tokenizer_files: dict[str, bytes] = field(default_factory=dict, repr=False)


class Backend(Protocol):
    """Somebody who generates."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        """Stream one request; closing the generator aborts it.

        Raises RequestError, QueueFullError or UnavailableError.
        """
        ...

    async def card(self) -> ModelCard:
        """Raises UnavailableError while no model is loaded."""
        ...

    async def check_ready(self) -> None:
        """Raises UnavailableError, with the reason, while requests could not be answered."""
        ...

    async def stats(self) -> dict[str, Any]:
        """What `summary` makes."""
        ...


REQUEST_COUNTS = ("requests", "finished", "aborted", "running", "waiting")
TOKEN_COUNTS = ("prompt_tokens", "drafted", "admitted", "accepted", "emitted")


def summary(targets: list[dict[str, Any]], controller: dict[str, Any] | None) -> dict[str, Any]:
    """The counts of all target replicas together, then each one's own figures and the controller's picture."""
    totals = {name: sum(target[name] for target in targets) for name in REQUEST_COUNTS + TOKEN_COUNTS}
    return {"totals": totals, "targets": targets, "controller": controller}
