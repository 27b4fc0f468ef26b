"""Classic speculative decoding: a small causal LM with the target's vocabulary drafts token by token (paper 2.2).

It runs through the same paged class as the target. Knows nothing of features; a request new to it brings its history.
Letters: R requests of a call, T packed tokens, K draft positions.
"""

import time
from dataclasses import replace

import numpy as np
import torch

from dspark_ray.algorithm.columns import SamplingColumns
from dspark_ray.algorithm.proposal import DraftBatch
from dspark_ray.algorithm.sampling import DraftSample, sample_draft
from dspark_ray.engine.batch import DraftPlan, FeatureBatch
from dspark_ray.engine.drafters.assemble import assemble, empty_draft_batch
from dspark_ray.engine.drafters.contexts import Context, ContextPool, packed_positions
from dspark_ray.models.attention import build_attention_batch
from dspark_ray.models.target import TargetModel


class DraftModelDrafter:
    """Implements Drafter. K/V of drafts is scratch behind the committed tokens, overwritten by the next step."""

    def __init__(
        self,
        model: TargetModel,
        *,
        num_draft_tokens: int,
        num_pages: int,
        page_size: int = 16,
        draft_top_k: int = 64,
    ) -> None:
        self._model = model
        self._num_draft_tokens = num_draft_tokens
        self._draft_top_k = draft_top_k
        self._pool = ContextPool(num_pages, page_size)
        self._cache = model.allocate(num_pages, page_size)
        self._generator = torch.Generator(device=model.device)
        self._generator.seed()

    @property
    def num_draft_tokens(self) -> int:
        return self._num_draft_tokens

    @torch.inference_mode()
    def propose(self, plan: DraftPlan, features: FeatureBatch) -> DraftBatch:
        """Catch up with the committed tokens, then draft K tokens one after the other, all requests together."""
        started = time.perf_counter()
        self._pool.drop(plan.dropped)
        features = with_histories(features, plan, self._pool)
        placed = self._pool.place(
            features.request_ids,
            features.start_positions,
            features.counts,
            self._num_draft_tokens,
            self._model.max_positions - self._num_draft_tokens + 1,
        )
        running = {
            row: context for row, context in placed.contexts.items() if features.counts[row] or features.drafts[row]
        }
        drafting = {row: context for row, context in running.items() if features.drafts[row]}
        logits = self._catch_up(features, running) if running else None
        batch = empty_draft_batch(self._num_draft_tokens)
        if logits is not None and drafting:
            batch = self._draft(features, drafting, logits)
        return replace(batch, draft_seconds=time.perf_counter() - started)

    def _catch_up(self, features: FeatureBatch, contexts: dict[int, Context]) -> torch.Tensor:
        """Run the new tokens, and behind them the anchors that want a draft; logits of those anchors."""
        rows = np.array(list(contexts))
        counts, drafts = features.counts[rows], features.drafts[rows]
        ends = np.cumsum(features.counts)
        pieces = []
        for row in rows:
            pieces.append(features.token_ids[ends[row] - features.counts[row] : ends[row]])
            pieces.append(features.anchors[row : row + 1][: int(features.drafts[row])])
        return self._forward(
            list(contexts.values()),
            np.concatenate(pieces),
            packed_positions(features.start_positions[rows], counts + drafts),
            np.array([context.length for context in contexts.values()]) - counts,
            counts + drafts,
            (np.cumsum(counts + drafts) - 1)[drafts],
        )

    def _draft(self, features: FeatureBatch, contexts: dict[int, Context], logits: torch.Tensor) -> DraftBatch:
        rows, members = np.array(list(contexts)), list(contexts.values())
        positions, columns = features.anchor_positions[rows], features.sampling.select(rows)
        starts, ones = np.array([context.length for context in members]), np.ones(len(rows), dtype=np.int64)
        samples = [self._sample(logits, columns, positions + 1)]
        for k in range(1, self._num_draft_tokens):
            tokens = samples[-1].tokens.cpu().numpy()
            logits = self._forward(members, tokens, positions + k, starts + k, ones, np.arange(len(rows)))
            samples.append(self._sample(logits, columns, positions + k + 1))
        # max_v q(v) knows nothing of the token drawn, so admission by it stays exact (Appendix A).
        confidences = torch.stack([sample.top_prob for sample in samples], dim=1).cpu().numpy()
        num_drafts = np.full(len(rows), self._num_draft_tokens, dtype=np.int64)
        request_ids = tuple(features.request_ids[row] for row in rows)
        return assemble(request_ids, positions, num_drafts, samples, confidences, columns)

    def _sample(self, logits: torch.Tensor, columns: SamplingColumns, positions: np.ndarray) -> DraftSample:
        return sample_draft(logits, columns, positions, self._generator, self._draft_top_k)

    def _forward(
        self,
        contexts: list[Context],
        token_ids: np.ndarray,  # [T]
        positions: np.ndarray,  # [T]
        starts: np.ndarray,  # [R] cache index of each row's first token
        lens: np.ndarray,  # [R]
        logit_rows: np.ndarray,
    ) -> torch.Tensor:
        device = self._model.device
        batch = build_attention_batch(
            self._pool.page_table(contexts), self._pool.page_size, starts, lens, causal=True, device=device
        )
        token_tensor, position_tensor, row_tensor = (
            torch.from_numpy(np.ascontiguousarray(values)).to(device) for values in (token_ids, positions, logit_rows)
        )
        return self._model.forward(token_tensor, position_tensor, self._cache, batch, row_tensor).logits


def with_histories(features: FeatureBatch, plan: DraftPlan, pool: ContextPool) -> FeatureBatch:
    """The step with the past of requests that the pool does not know put in front of their new tokens."""
    ends = np.cumsum(features.counts)
    starts, counts, pieces = features.start_positions.copy(), features.counts.copy(), []
    for row, request_id in enumerate(features.request_ids):
        history = plan.histories.get(request_id)
        if history is not None and request_id not in pool and len(history) == starts[row]:
            pieces.append(np.asarray(history, dtype=np.int64))
            counts[row] += starts[row]
            starts[row] = 0
        pieces.append(features.token_ids[ends[row] - features.counts[row] : ends[row]])
    token_ids = np.concatenate(pieces) if pieces else features.token_ids
    return replace(features, start_positions=starts, counts=counts, token_ids=token_ids)
