"""Prompt lookup: propose what followed the last tokens when they occurred before. Needs no model and no features.

State is the tokens of each request. Letters: R requests of a call, K draft positions, L tokens of a history.
"""

import time
from collections.abc import Mapping

import numpy as np

from dspark_ray.algorithm.proposal import DraftBatch
from dspark_ray.engine.batch import DraftPlan, FeatureBatch
from dspark_ray.engine.drafters.assemble import empty_draft_batch, needs_q

EMA_WEIGHT = 0.02  # weight of one observed draft position in the running acceptance
MAX_HISTORIES = 4096  # requests remembered; the longest unused go first


def lookup(tokens: np.ndarray, ngram_min: int, ngram_max: int, num_draft_tokens: int) -> np.ndarray | None:
    """K tokens that followed the latest earlier occurrence of the longest matching suffix, or None.

    Args: tokens [L] int64. The suffix has ngram_max down to ngram_min tokens. Where the copy reaches the end of
    `tokens` it goes on with its own beginning, as a repetition does.
    """
    end = _longest_match(tokens, ngram_min, ngram_max)
    return None if end is None else np.resize(tokens[end:], num_draft_tokens)


def _longest_match(tokens: np.ndarray, ngram_min: int, ngram_max: int) -> int | None:
    """Index behind the latest earlier occurrence of the longest matching suffix: candidates thin token by token."""
    ends, found = np.arange(len(tokens) - 1), None
    for length in range(1, ngram_max + 1):
        ends = ends[ends >= length - 1]
        ends = ends[tokens[ends - (length - 1)] == tokens[-length]]
        if not len(ends):
            break
        if length >= ngram_min:
            found = int(ends[-1]) + 1
    return found


def updated_acceptance(
    acceptance: np.ndarray,  # [K]
    num_admitted: np.ndarray,  # [R]
    num_accepted: np.ndarray,  # [R]
) -> np.ndarray:  # [K]
    """Running P(position k accepted | those before it accepted) after one more step.

    A row tells of its accepted positions and of the first rejected one; what came behind was never judged.
    """
    positions = np.arange(len(acceptance))
    judged = (positions < np.minimum(num_accepted + 1, num_admitted)[:, None]).sum(0)
    accepted = (positions < np.minimum(num_accepted, num_admitted)[:, None]).sum(0)
    weight = 1.0 - (1.0 - EMA_WEIGHT) ** judged
    return acceptance + weight * (accepted / np.maximum(judged, 1) - acceptance)


class TokenHistory:
    """Tokens of one request from some position on; appending is amortised constant time."""

    def __init__(self) -> None:
        self._buffer = np.zeros(64, dtype=np.int64)
        self._first = self._length = 0

    def write(self, start: int, tokens: np.ndarray) -> None:
        """Tokens at positions start, ...: they replace what was there and behind. A gap starts a new history."""
        if not self._first <= start <= self._first + self._length:
            self._first, self._length = start, 0
        self._length = start - self._first
        self._reserve(self._length + len(tokens) + 1)
        self._buffer[self._length : self._length + len(tokens)] = tokens
        self._length += len(tokens)

    def followed_by(self, anchor: int) -> np.ndarray:  # [L + 1]
        """The history and an anchor that is not part of it yet (a view, good until the next write)."""
        self._buffer[self._length] = anchor
        return self._buffer[: self._length + 1]

    def _reserve(self, size: int) -> None:
        if size > len(self._buffer):
            self._buffer = np.resize(self._buffer, 2 * size)


class NgramDrafter:
    """Implements Drafter. Its confidence is the acceptance seen so far at each position, never of the token itself."""

    def __init__(
        self, *, num_draft_tokens: int, ngram_min: int = 2, ngram_max: int = 4, fallback_confidence: float = 0.7
    ) -> None:
        self._num_draft_tokens = num_draft_tokens
        self._ngram_min, self._ngram_max = ngram_min, ngram_max
        self._acceptance = np.full(num_draft_tokens, fallback_confidence)
        self._histories: dict[str, TokenHistory] = {}

    @property
    def num_draft_tokens(self) -> int:
        return self._num_draft_tokens

    def propose(self, plan: DraftPlan, features: FeatureBatch) -> DraftBatch:
        """Record the committed tokens, then look up a continuation for the anchors that want a draft."""
        started = time.perf_counter()
        for request_id in plan.dropped:
            self._histories.pop(request_id, None)
        self._acceptance = updated_acceptance(self._acceptance, features.num_admitted, features.num_accepted)
        self._record(plan.histories, features)
        found = {int(row): self._lookup(features, int(row)) for row in np.flatnonzero(features.drafts)}
        drafts = {row: draft for row, draft in found.items() if draft is not None}
        return self._batch(features, drafts, started)

    def _record(self, histories: Mapping[str, np.ndarray], features: FeatureBatch) -> None:
        ends = np.cumsum(features.counts)
        for row, request_id in enumerate(features.request_ids):
            history = self._histories.pop(request_id, None)
            if history is None:
                history = TokenHistory()
                history.write(0, np.asarray(histories.get(request_id, ()), dtype=np.int64))
            tokens = features.token_ids[ends[row] - features.counts[row] : ends[row]]
            history.write(int(features.start_positions[row]), tokens)
            self._histories[request_id] = history
        while len(self._histories) > max(MAX_HISTORIES, len(features.request_ids)):
            self._histories.pop(next(iter(self._histories)))

    def _lookup(self, features: FeatureBatch, row: int) -> np.ndarray | None:
        tokens = self._histories[features.request_ids[row]].followed_by(int(features.anchors[row]))
        return lookup(tokens, self._ngram_min, self._ngram_max, self._num_draft_tokens)

    def _batch(self, features: FeatureBatch, drafts: dict[int, np.ndarray], started: float) -> DraftBatch:
        if not drafts:
            return empty_draft_batch(self._num_draft_tokens)
        rows, tokens = np.array(list(drafts), dtype=np.int64), np.stack(list(drafts.values()))
        q_ids = q_probs = None
        rejection = needs_q(features.sampling.select(rows))
        if rejection.any():  # a looked-up token is drawn from a distribution with all its mass on it
            q_probs = np.broadcast_to(rejection[:, None, None], (*tokens.shape, 1)).astype(np.float32)
            q_ids = tokens[:, :, None] * rejection[:, None, None]
        return DraftBatch(
            tuple(features.request_ids[row] for row in rows),
            features.anchor_positions[rows],
            np.full(len(rows), self._num_draft_tokens, dtype=np.int64),
            tokens,
            np.tile(self._acceptance.astype(np.float32), (len(rows), 1)),
            q_ids=q_ids,
            q_probs=q_probs,
            draft_seconds=time.perf_counter() - started,
        )
