"""The messages of one engine step: plan, result, features. What the engine, the ranks and the drafters exchange.

Plain frozen values of numpy columns; a feature tensor is the only large part. Letters: R rows (requests) of the step,
N packed tokens, P pages of the longest row, K draft positions, d hidden size.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from dspark_ray.algorithm.columns import SamplingColumns


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the target does in one step. A row is a prefill chunk or one decoding request (its anchor token).

    Drafts are not part of it: they arrive beside it, straight from the drafters, and each rank admits a prefix of
    each from the numbers here and in the drafts alone.
    """

    step: int
    request_ids: tuple[str, ...]  # R
    token_ids: np.ndarray  # [N] int64, prefill chunk or anchor of each row, packed
    query_lens: np.ndarray  # [R] int64, tokens of each row in token_ids (1 for decoding rows)
    start_positions: np.ndarray  # [R] int64, position of each row's first token
    samples: np.ndarray  # [R] bool, the row's last token yields a next token (decoding rows, last prefill chunks)
    max_drafts: np.ndarray  # [R] int64, most drafts that may be verified for the row (0 for prefill)
    page_table: np.ndarray  # [R, P] int64, pages of each row, enough for query_lens + max_drafts
    sampling: SamplingColumns
    wants_draft: np.ndarray  # [R] bool, a draft for the step after is wanted
    draft_budget: int | None = None  # drafts admitted over all rows (policy adaptive); None: the policy decides alone
    routes: np.ndarray = field(
        default_factory=lambda: np.zeros(0, dtype=np.int64)
    )  # [R] drafter index; set by executor

    @property
    def num_rows(self) -> int:
        return len(self.request_ids)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step produced, a few numbers a row; rank 0's answer to the engine.

    `tokens[r, : num_accepted[r] + 1]` are the new tokens of a sampling row: accepted drafts, then the bonus (or
    corrected) token. Rows that only prefill yield nothing. A row whose logits are not finite is in `failed`.
    """

    step: int
    tokens: np.ndarray  # [R, K + 1] int64
    num_new: np.ndarray  # [R] int64, 0 for rows that do not sample, else num_accepted + 1
    num_drafted: np.ndarray  # [R] int64, draft tokens that arrived for the row
    num_admitted: np.ndarray  # [R] int64, of those, sent to verification
    num_accepted: np.ndarray  # [R] int64
    survival: np.ndarray  # [R, K] float32, live survivals of the drafts that arrived (0 where none)
    failed: np.ndarray  # [R] bool
    batch_tokens: int  # tokens in the forward pass
    step_seconds: float  # of the forward pass and verification
    draft_seconds: float = 0.0  # of the slowest drafter whose drafts were used


@dataclass(frozen=True, slots=True)
class FeatureBatch:
    """What a drafter learns from one step: newly committed tokens and their features, and the new anchors.

    For row r, `counts[r]` tokens at positions `start_positions[r]...` were committed (prefill chunk, or the old anchor
    and the accepted drafts); `features` holds H_ctx of equation 2 for each (None for drafters that need only tokens).
    If `drafts[r]`, the drafter proposes a block after `anchors[r]`, which sits at `start_positions[r] + counts[r]`.
    """

    step: int
    request_ids: tuple[str, ...]  # R
    start_positions: np.ndarray  # [R] int64
    counts: np.ndarray  # [R] int64
    token_ids: np.ndarray  # [N] int64, packed
    features: torch.Tensor | None  # [N, d]
    anchors: np.ndarray  # [R] int64
    drafts: np.ndarray  # [R] bool
    num_admitted: np.ndarray  # [R] int64, drafts verified in the step (for acceptance estimates)
    num_accepted: np.ndarray  # [R] int64
    sampling: SamplingColumns

    @property
    def anchor_positions(self) -> np.ndarray:  # [R] int64
        return self.start_positions + self.counts


def empty_feature_batch() -> FeatureBatch:
    """A step in which nothing was committed: only to tell a drafter who is gone."""
    none, flags = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool)
    real = np.zeros(0, dtype=np.float32)
    return FeatureBatch(
        step=0,
        request_ids=(),
        start_positions=none,
        counts=none,
        token_ids=none,
        features=None,
        anchors=none,
        drafts=flags,
        num_admitted=none,
        num_accepted=none,
        sampling=SamplingColumns(real, none, real, real, none, flags),
    )


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What the engine tells a drafter beside the features: who is gone, and the past of requests new to it."""

    step: int
    dropped: tuple[str, ...] = ()  # request ids whose state can be freed
    histories: dict[str, np.ndarray] = field(default_factory=dict)  # tokens before this step, for requests new here


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What the engine must know of a started target group."""

    num_pages: int
    page_size: int
    max_model_len: int
    vocab_size: int
    num_draft_tokens: int  # K, 0 without a drafter
    dtype: str
    device: str
    provenance: dict[str, str] = field(default_factory=dict)
