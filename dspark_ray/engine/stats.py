"""Running totals of an engine: what was drafted, admitted, accepted, emitted, and where acceptance ends in a block."""

import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dspark_ray.engine.batch import StepResult

logger = logging.getLogger(__name__)

USELESS_ROUNDS = 200  # verified drafts without one acceptance: something is wrong


@dataclass(slots=True)
class EngineStats:
    """Totals since start. `rounds` counts decoding rows that carried at least one admitted draft."""

    num_draft_tokens: int
    steps: int = 0
    requests: int = 0
    finished: int = 0
    aborted: int = 0
    rebuilds: int = 0
    drafted: int = 0
    admitted: int = 0
    accepted: int = 0
    emitted: int = 0
    rounds: int = 0
    decode_rounds: int = 0
    prompt_tokens: int = 0
    step_seconds: float = 0.0
    said_useless: bool = False
    admitted_at: np.ndarray = field(init=False)  # [K] int64
    accepted_at: np.ndarray = field(init=False)  # [K] int64

    def __post_init__(self) -> None:
        self.admitted_at = np.zeros(self.num_draft_tokens, dtype=np.int64)
        self.accepted_at = np.zeros(self.num_draft_tokens, dtype=np.int64)

    def record(self, result: StepResult, decoding: np.ndarray) -> None:
        """Add one step; `decoding` [R] marks the rows that continued a sequence (not the ends of prefill)."""
        self.steps += 1
        self.step_seconds += result.step_seconds
        self.drafted += int(result.num_drafted.sum())
        self.admitted += int(result.num_admitted.sum())
        self.accepted += int(result.num_accepted.sum())
        self.rounds += int((result.num_admitted > 0).sum())
        self.decode_rounds += int(decoding.sum())
        positions = np.arange(self.num_draft_tokens)
        self.admitted_at += (result.num_admitted[:, None] > positions).sum(axis=0)
        self.accepted_at += (result.num_accepted[:, None] > positions).sum(axis=0)
        if self.rounds >= USELESS_ROUNDS and self.accepted == 0 and not self.said_useless:
            self.said_useless = True
            logger.warning(
                "not one of %d verified draft tokens was accepted (accepted length 1.00): the drafter does not fit its "
                "target; check drafter.model, target_layer_ids and mask_token_id",
                self.admitted,
            )

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens a decoding round emits, bonus included; None before the first round."""
        return 1.0 + self.accepted / self.decode_rounds if self.decode_rounds else None

    def as_dict(self) -> dict[str, Any]:
        reached = np.concatenate([[self.rounds], self.accepted_at[:-1]]) if self.num_draft_tokens else np.zeros(0)
        conditional = [
            round(float(hit / seen), 4) if seen else None
            for hit, seen in zip(self.accepted_at, np.minimum(self.admitted_at, reached), strict=True)
        ]
        return {
            "steps": self.steps,
            "requests": self.requests,
            "finished": self.finished,
            "aborted": self.aborted,
            "rebuilds": self.rebuilds,
            "prompt_tokens": self.prompt_tokens,
            "drafted": self.drafted,
            "admitted": self.admitted,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "rounds": self.rounds,
            "mean_accepted_length": self.mean_accepted_length,
            "admitted_at_position": self.admitted_at.tolist(),
            "accepted_at_position": self.accepted_at.tolist(),
            "acceptance_by_position": conditional,
            "mean_step_seconds": self.step_seconds / self.steps if self.steps else None,
        }
