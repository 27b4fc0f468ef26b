"""The autoregressive drafter: cached entries of known tokens, then K passes of one layer, one token a request each.

State is keyed by request id: pages of K/V, and the feature of the last token seen, which the next token's entry needs.
Knows nothing of targets, transport or scheduling. Letters: R requests of a call, N packed tokens, K draft positions,
d hidden size.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from dspark_ray.algorithm.columns import SamplingColumns
from dspark_ray.algorithm.proposal import DraftBatch
from dspark_ray.algorithm.sampling import DraftSample, sample_draft
from dspark_ray.engine.batch import DraftPlan, FeatureBatch
from dspark_ray.engine.drafters.assemble import assemble, empty_draft_batch
from dspark_ray.engine.drafters.confidences import Calibration, calibrated, top_probability_logits
from dspark_ray.engine.drafters.contexts import Context, ContextPool, packed_positions
from dspark_ray.models.attention import ANY_QUERIES, build_attention_batch
from dspark_ray.models.autoregressive_draft import AutoregressiveDraftModel


@dataclass(frozen=True, slots=True)
class LastFeature:
    """The feature of the token before `next_position`."""

    next_position: int
    feature: torch.Tensor  # [d]


class AutoregressiveDrafter:
    """Implements Drafter. Without room or with broken features a request gets no drafts; it never raises for that.

    K/V of drafts is scratch behind the committed tokens: what was rejected is overwritten by the next step.
    """

    def __init__(
        self,
        model: AutoregressiveDraftModel,
        *,
        num_draft_tokens: int,
        num_pages: int,
        page_size: int = 16,
        draft_top_k: int = 64,
        calibration: Calibration | None = None,
    ) -> None:
        self._model = model
        self._num_draft_tokens = num_draft_tokens
        self._draft_top_k = draft_top_k
        self._calibration = calibration
        self._pool = ContextPool(num_pages, page_size)
        self._cache = model.new_cache(num_pages * page_size)
        self._last: dict[str, LastFeature] = {}
        self._device = model.norm.weight.device
        # A stream of its own: draft noise that is also the target's recovery noise would bias the output.
        self._generator = torch.Generator(device=self._device)
        self._generator.seed()

    @property
    def num_draft_tokens(self) -> int:
        return self._num_draft_tokens

    @torch.inference_mode()
    def propose(self, plan: DraftPlan, features: FeatureBatch) -> DraftBatch:
        """Append the step's tokens to the contexts, then draft after the anchors that want a draft."""
        started = time.perf_counter()
        self._pool.drop(plan.dropped)
        self._forget_the_dropped()
        contexts = self._append(features)
        drafting = {row: context for row, context in contexts.items() if features.drafts[row]}
        batch = self._draft(features, drafting) if drafting else empty_draft_batch(self._num_draft_tokens)
        self._forget_the_dropped()
        return replace(batch, draft_seconds=time.perf_counter() - started)

    def _append(self, features: FeatureBatch) -> dict[int, Context]:
        """Contexts by row, the step's tokens in them; rows without room are left out."""
        placed = self._pool.place(
            features.request_ids,
            features.start_positions,
            features.counts,
            self._num_draft_tokens,
            self._model.config.max_positions,
        )
        if len(placed.kept):
            assert features.features is not None, "this drafter needs features, not only tokens"
            rows = np.array([row for row in placed.contexts if features.counts[row]])
            fresh = features.features[torch.from_numpy(placed.kept)].to(self._device)
            self._model.append_context(
                self._tensor(features.token_ids[placed.kept]),
                self._shifted(fresh, features, rows),
                self._tensor(packed_positions(features.start_positions, features.counts)[placed.kept]),
                self._tensor(placed.slots),
                self._cache,
            )
            self._remember(fresh, features, rows)
        return placed.contexts

    def _shifted(self, fresh: torch.Tensor, features: FeatureBatch, rows: np.ndarray) -> torch.Tensor:  # [N, d]
        """For each token the feature of the token before it."""
        shifted, counts = fresh.roll(1, dims=0), features.counts[rows]
        firsts = self._tensor(np.cumsum(counts) - counts)
        shifted[firsts] = self._before(features, rows, features.start_positions[rows]).to(shifted.dtype)
        return shifted

    def _remember(self, fresh: torch.Tensor, features: FeatureBatch, rows: np.ndarray) -> None:
        lasts = fresh[self._tensor(np.cumsum(features.counts[rows]) - 1)]
        for row, feature in zip(rows.tolist(), lasts, strict=True):
            position = int(features.anchor_positions[row])
            self._last[features.request_ids[row]] = LastFeature(position, feature)

    def _before(self, features: FeatureBatch, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:  # [R, d]
        """Features of the tokens before `positions`; zero at a sequence's start, behind a gap and after a restart."""
        unknown = self._model.norm.weight.new_zeros(self._model.config.hidden_size)
        found = []
        for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
            last = self._last.get(features.request_ids[row])
            known = last is not None and last.next_position == position
            found.append(last.feature.to(unknown.dtype) if last is not None and known else unknown)
        return torch.stack(found)

    def _forget_the_dropped(self) -> None:
        """A request whose context is gone starts again without a past."""
        self._last = {request_id: last for request_id, last in self._last.items() if request_id in self._pool}

    def _draft(self, features: FeatureBatch, contexts: dict[int, Context]) -> DraftBatch:
        rows = np.array(list(contexts))
        positions, columns = features.anchor_positions[rows], features.sampling.select(rows)
        before = self._before(features, rows, positions)
        samples, finite = self._unroll(
            self._tensor(features.anchors[rows]), before, positions, list(contexts.values()), columns
        )
        request_ids = tuple(features.request_ids[row] for row in rows)
        # Features that were not finite stay in the context: forget it, so that the request recovers.
        self._pool.drop(request_id for request_id, ok in zip(request_ids, finite, strict=True) if not ok)
        return assemble(
            request_ids,
            positions,
            np.where(finite, self._num_draft_tokens, 0),
            samples,
            calibrated(top_probability_logits(samples), self._calibration, columns),
            columns,
        )

    def _unroll(
        self,
        anchors: torch.Tensor,  # [R]
        before: torch.Tensor,  # [R, d]
        positions: np.ndarray,  # [R]
        contexts: Sequence[Context],
        columns: SamplingColumns,
    ) -> tuple[list[DraftSample], np.ndarray]:  # K samples, [R] bool: every hidden state was finite
        """Each draft is drawn given the ones before it, and enters with the hidden state it was drawn from."""
        table, starts = self._pool.page_table(contexts), np.array([context.length for context in contexts])
        previous, feature, samples = anchors, before, []
        finite = torch.ones(len(anchors), dtype=torch.bool, device=self._device)
        for k in range(self._num_draft_tokens):
            batch = build_attention_batch(
                table,
                self._pool.page_size,
                starts + k,
                np.ones_like(starts),
                causal=True,
                device=self._device,
                sizes=ANY_QUERIES,
            )
            hidden, feature = self._model.forward_step(
                previous, feature, self._tensor(positions + k), batch, self._cache
            )
            logits, vocabulary = self._model.base_logits(hidden), self._model.draft_to_target
            at = positions + k + 1
            samples.append(sample_draft(logits, columns, at, self._generator, self._draft_top_k, vocabulary))
            finite &= hidden.isfinite().all(-1)
            previous = samples[-1].tokens
        return samples, finite.cpu().numpy()

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)
