"""The DSpark drafter: cached target features, one block forward for all requests, then the sequential stage (3.1).

State is keyed by request id. Knows nothing of targets, transport or scheduling; DFlash is the case without heads.
Letters: R requests of a call, N packed tokens, K draft positions, V vocabulary, d hidden size.
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
from dspark_ray.engine.drafters.confidences import Calibration, calibrated, top_probability_logits
from dspark_ray.engine.drafters.contexts import Context, ContextPool, packed_positions
from dspark_ray.models.attention import build_attention_batch
from dspark_ray.models.draft_model import DSparkDraftModel, block_tokens


class DSparkDrafter:
    """Implements Drafter. Without room or with broken features a request gets no drafts; it never raises for that."""

    def __init__(
        self,
        model: DSparkDraftModel,
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
        self._device = model.norm.weight.device
        # A stream of its own: draft noise that is also the target's recovery noise would bias the output.
        self._generator = torch.Generator(device=self._device)
        self._generator.seed()

    @property
    def num_draft_tokens(self) -> int:
        return self._num_draft_tokens

    @torch.inference_mode()
    def propose(self, plan: DraftPlan, features: FeatureBatch) -> DraftBatch:
        """Append the step's features to the contexts, then draft after the anchors that want a draft."""
        started = time.perf_counter()
        self._pool.drop(plan.dropped)
        contexts = self._append(features)
        drafting = {row: context for row, context in contexts.items() if features.drafts[row]}
        batch = self._draft(features, drafting) if drafting else empty_draft_batch(self._num_draft_tokens)
        return replace(batch, draft_seconds=time.perf_counter() - started)

    def _append(self, features: FeatureBatch) -> dict[int, Context]:
        """Contexts by row, the step's features in them; rows without room are left out."""
        config = self._model.config
        placed = self._pool.place(
            features.request_ids, features.start_positions, features.counts, config.block_size, config.max_positions
        )
        if len(placed.kept):
            assert features.features is not None, "this drafter needs features, not only tokens"
            positions = packed_positions(features.start_positions, features.counts)[placed.kept]
            kept = features.features if len(placed.kept) == len(features.features) else features.features[placed.kept]
            self._model.append_context(
                kept.to(self._device), self._tensor(positions), self._tensor(placed.slots), self._cache
            )
        return placed.contexts

    def _draft(self, features: FeatureBatch, contexts: dict[int, Context]) -> DraftBatch:
        rows = np.array(list(contexts))
        anchors, positions = self._tensor(features.anchors[rows]), features.anchor_positions[rows]
        columns = features.sampling.select(rows)
        hidden = self._block(anchors, positions, list(contexts.values()))
        samples = self._sequential_stage(hidden, anchors, positions, columns)
        finite = hidden.isfinite().flatten(1).all(-1).cpu().numpy()
        request_ids = tuple(features.request_ids[row] for row in rows)
        # Features that were not finite stay in the context: forget it, so that the request recovers.
        self._pool.drop(request_id for request_id, ok in zip(request_ids, finite, strict=True) if not ok)
        return assemble(
            request_ids,
            positions,
            np.where(finite, self._num_draft_tokens, 0),
            samples,
            self._confidences(hidden, anchors, samples, columns),
            columns,
        )

    def _block(self, anchors: torch.Tensor, positions: np.ndarray, contexts: list[Context]) -> torch.Tensor:
        """Hidden states [R, K, d] that predict the drafts: the parallel stage for all requests at once."""
        config = self._model.config
        starts = np.array([context.length for context in contexts])
        batch = build_attention_batch(
            self._pool.page_table(contexts),
            self._pool.page_size,
            starts,
            np.full(len(starts), config.block_size),
            causal=False,
            device=self._device,
        )
        block_positions = self._tensor(positions[:, None] + np.arange(config.block_size))
        hidden = self._model.forward_block(block_tokens(anchors, config), block_positions, batch, self._cache)
        return self._model.predictions(hidden, self._num_draft_tokens)

    def _sequential_stage(
        self, hidden: torch.Tensor, anchors: torch.Tensor, positions: np.ndarray, columns: SamplingColumns
    ) -> list[DraftSample]:
        """Equation 4, left to right: each draft is drawn given the ones before it."""
        head = self._model.markov_head
        base = self._model.base_logits(hidden)
        state = None if head is None else head.initial_state(len(anchors))
        previous, samples = anchors, []
        for k in range(self._num_draft_tokens):
            logits = base[:, k]
            if head is not None:
                assert state is not None
                bias, state = head.step(state, previous, hidden[:, k])
                logits = logits + bias
            sample = sample_draft(
                logits, columns, positions + k + 1, self._generator, self._draft_top_k, self._model.draft_to_target
            )
            samples.append(sample)
            previous = sample.tokens
        return samples

    def _confidences(
        self, hidden: torch.Tensor, anchors: torch.Tensor, samples: list[DraftSample], columns: SamplingColumns
    ) -> np.ndarray:  # [R, K]
        """c_k of equation 7, calibrated; without a head the drafter's own top probability."""
        model = self._model
        if model.confidence_head is None:
            logits = top_probability_logits(samples)
        else:
            previous = torch.stack([anchors, *(sample.tokens for sample in samples[:-1])], dim=1)
            embedding = None if model.markov_head is None else model.markov_head.markov_w1(previous)
            logits = model.confidence_head(hidden, embedding).float()
        return calibrated(logits, self._calibration, columns)

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)
