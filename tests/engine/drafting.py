"""Steps and sampling columns for driving drafters in tests."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dspark_ray.algorithm.columns import SamplingColumns
from dspark_ray.algorithm.proposal import DraftBatch, DraftProposal
from dspark_ray.engine.batch import DraftPlan, FeatureBatch
from dspark_ray.engine.drafters.base import Drafter


@dataclass(frozen=True)
class Row:
    """One request's part of a step: committed tokens from `start` on, their features, and the new anchor."""

    request_id: str
    start: int
    tokens: Sequence[int] | np.ndarray
    anchor: int
    features: torch.Tensor | None = None
    drafts: bool = True
    temperature: float = 0.0
    coupled: bool = False
    seed: int = 7
    num_admitted: int = 0
    num_accepted: int = 0


@dataclass
class Steps:
    """Calls a drafter step after step and looks drafts up by request."""

    drafter: Drafter
    step: int = 0
    last: DraftBatch | None = field(default=None)

    def __call__(
        self, *rows: Row, dropped: Sequence[str] = (), histories: dict[str, np.ndarray] | None = None
    ) -> dict[str, DraftProposal]:
        self.step += 1
        plan = DraftPlan(self.step, tuple(dropped), histories or {})
        self.last = self.drafter.propose(plan, feature_batch(self.step, rows))
        assert self.last.tokens.shape[1] == self.drafter.num_draft_tokens
        return {request_id: self.last.proposal(row) for row, request_id in enumerate(self.last.request_ids)}


def feature_batch(step: int, rows: Sequence[Row]) -> FeatureBatch:
    def column(values: list[object], dtype: type) -> np.ndarray:
        return np.array(values, dtype=dtype)

    features = [row.features for row in rows if row.features is not None]
    return FeatureBatch(
        step=step,
        request_ids=tuple(row.request_id for row in rows),
        start_positions=column([row.start for row in rows], np.int64),
        counts=column([len(row.tokens) for row in rows], np.int64),
        token_ids=np.concatenate([np.asarray(row.tokens, dtype=np.int64) for row in rows]),
        features=torch.cat(features) if features else None,
        anchors=column([row.anchor for row in rows], np.int64),
        drafts=column([row.drafts for row in rows], np.bool_),
        num_admitted=column([row.num_admitted for row in rows], np.int64),
        num_accepted=column([row.num_accepted for row in rows], np.int64),
        sampling=SamplingColumns(
            temperature=column([row.temperature for row in rows], np.float32),
            top_k=np.zeros(len(rows), dtype=np.int64),
            top_p=np.ones(len(rows), dtype=np.float32),
            min_p=np.zeros(len(rows), dtype=np.float32),
            noise_seeds=column([row.seed for row in rows], np.int64),
            coupled=column([row.coupled for row in rows], np.bool_),
        ),
    )
