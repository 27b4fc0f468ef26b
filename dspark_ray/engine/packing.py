"""The token axis of a step: drafts in row order, rows packed with their admitted drafts, features for the drafters.

Pure functions over a plan and its drafts; knows no model. Letters: R rows, T packed tokens, K draft positions, V
vocabulary, d hidden size.
"""

from dataclasses import dataclass

import numpy as np
import torch

from dspark_ray.algorithm.proposal import DraftBatch, survival
from dspark_ray.algorithm.verification import Verdict
from dspark_ray.engine.batch import FeatureBatch, StepPlan


@dataclass(frozen=True, slots=True)
class AlignedDrafts:
    """The drafts that arrived, in the order of the plan's rows; rows without a draft have num_drafts 0."""

    num_drafts: np.ndarray  # [R] int64
    tokens: np.ndarray  # [R, K] int64
    survival: np.ndarray  # [R, K] float32
    q_ids: np.ndarray | None  # [R, K, k] int64
    q_probs: np.ndarray | None  # [R, K, k] float32
    draft_seconds: float


def align_drafts(plan: StepPlan, num_draft_tokens: int, drafts: tuple[DraftBatch, ...]) -> AlignedDrafts:
    """Bring drafts into row order. A draft for an anchor other than the row's is stale and left out (by position,
    never by a token's value)."""
    rows, width = plan.num_rows, num_draft_tokens
    index = {request_id: row for row, request_id in enumerate(plan.request_ids)}
    anchors = plan.start_positions + plan.query_lens - 1
    num_drafts = np.zeros(rows, dtype=np.int64)
    tokens = np.zeros((rows, width), dtype=np.int64)
    confidences = np.zeros((rows, width), dtype=np.float32)
    support = max((batch.q_ids.shape[2] for batch in drafts if batch.q_ids is not None), default=0)
    q_ids = np.zeros((rows, width, support), dtype=np.int64)
    q_probs = np.zeros((rows, width, support), dtype=np.float32)
    for batch in drafts:
        pairs = [(i, index[r]) for i, r in enumerate(batch.request_ids) if r in index]
        source = np.array([i for i, _ in pairs], dtype=np.int64)
        target = np.array([row for _, row in pairs], dtype=np.int64)
        fresh = batch.anchor_positions[source] == anchors[target]
        source, target = source[fresh], target[fresh]
        num_drafts[target] = np.minimum(batch.num_drafts[source], width)
        count = min(width, batch.tokens.shape[1])
        tokens[target, :count] = batch.tokens[source, :count]
        confidences[target, :count] = batch.confidences[source, :count]
        if batch.q_ids is not None and batch.q_probs is not None:
            k = batch.q_ids.shape[2]
            q_ids[target, :count, :k] = batch.q_ids[source, :count]
            q_probs[target, :count, :k] = batch.q_probs[source, :count]
    live = np.arange(width)[None, :] < num_drafts[:, None]
    seconds = max((batch.draft_seconds for batch in drafts), default=0.0)
    return AlignedDrafts(
        num_drafts,
        tokens,
        np.where(live, survival(confidences), 0.0).astype(np.float32),
        q_ids if support else None,
        q_probs if support else None,
        seconds,
    )


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """The token axis of one forward pass: each row's tokens, then its admitted drafts."""

    token_ids: np.ndarray  # [T] int64
    positions: np.ndarray  # [T] int64
    lens: np.ndarray  # [R] int64
    rows: np.ndarray  # [T] int64, row of each token
    within: np.ndarray  # [T] int64, its index in the row
    logit_rows: np.ndarray  # int64, packed indices that need logits: last token and drafts of sampling rows


def pack(plan: StepPlan, aligned: AlignedDrafts, verify_lens: np.ndarray) -> PackedTokens:
    lens = plan.query_lens + verify_lens
    rows = np.repeat(np.arange(plan.num_rows), lens)
    within = np.arange(lens.sum()) - np.repeat(np.cumsum(lens) - lens, lens)
    is_draft = within >= plan.query_lens[rows]
    token_ids = np.empty(len(rows), dtype=np.int64)
    token_ids[~is_draft] = plan.token_ids
    token_ids[is_draft] = aligned.tokens[rows[is_draft], (within - plan.query_lens[rows])[is_draft]]
    needs_logits = plan.samples[rows] & (within >= plan.query_lens[rows] - 1)
    return PackedTokens(
        token_ids, plan.start_positions[rows] + within, lens, rows, within, np.flatnonzero(needs_logits)
    )


def feature_batches(
    plan: StepPlan,
    packed: PackedTokens,
    committed: np.ndarray,  # [R] tokens of each row that stay
    verdict: Verdict,
    verify_lens: np.ndarray,
    features: torch.Tensor | None,  # [T, d]
    num_drafters: int,
) -> tuple[FeatureBatch, ...]:
    """One message per drafter with the rows routed to it. The anchor is the last token emitted."""
    stays = packed.within < committed[packed.rows]
    anchors = verdict.tokens[np.arange(plan.num_rows), verdict.num_accepted]
    batches = []
    for drafter in range(num_drafters):
        rows = np.flatnonzero((plan.routes == drafter) & plan.wants_draft & ~verdict.failed)
        chosen = np.flatnonzero(stays & np.isin(packed.rows, rows))
        batches.append(
            FeatureBatch(
                step=plan.step,
                request_ids=tuple(plan.request_ids[row] for row in rows),
                start_positions=plan.start_positions[rows],
                counts=committed[rows],
                token_ids=packed.token_ids[chosen],
                features=None if features is None else features[torch.from_numpy(chosen)],
                anchors=anchors[rows],
                drafts=plan.samples[rows],
                num_admitted=verify_lens[rows],
                num_accepted=verdict.num_accepted[rows],
                sampling=plan.sampling.select(rows),
            )
        )
    return tuple(batches)
