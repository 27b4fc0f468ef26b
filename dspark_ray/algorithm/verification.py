"""Verification of drafts against the target's logits (paper 2.1), in two exact modes, and plain greedy.

Decides which draft tokens stand and which token follows them; knows nothing of models, pages or schedules. Rows of a
batch may mix modes and lengths, and what happens in one request never touches another. Letters: R requests, K draft
positions, T = sum of (1 + verify_len) rows of logits, V vocabulary, k support of q.
"""

from dataclasses import dataclass

import numpy as np
import torch

from dspark_ray.algorithm.columns import SamplingColumns
from dspark_ray.algorithm.noise import Purpose, gumbel, uniform
from dspark_ray.algorithm.sampling import filtered_scores, host, process_probs

_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Verdict:
    """`tokens[r, : num_accepted[r] + 1]` are emitted: the accepted drafts, then the bonus or corrected token."""

    tokens: np.ndarray  # [R, K + 1] int64, 0 past what is emitted
    num_accepted: np.ndarray  # [R] int64, 0..verify_len
    failed: np.ndarray  # [R] bool, logits on the way were not finite; nothing in the row's tokens means anything


@dataclass(frozen=True, slots=True)
class _Drafts:
    """The host side of what is verified."""

    tokens: np.ndarray  # [R, K + 1] int64, padded by one column so that the bonus row needs no special case
    lens: np.ndarray  # [R] int64
    first_row: np.ndarray  # [R] int64, the request's first row in the packed logits
    positions: np.ndarray  # [R] int64, of the token that this row decides
    rounds: np.ndarray  # [R] int64
    q_ids: np.ndarray | None  # [R, K, k] int64
    q_probs: np.ndarray | None  # [R, K, k] float32


def verify(
    logits: torch.Tensor,  # [T, V], requests one after the other; row j of a request scores position anchor + 1 + j
    draft_tokens: np.ndarray | torch.Tensor,  # [R, K] int64
    verify_lens: np.ndarray | torch.Tensor,  # [R] int64, l_r: 0..K
    q_ids: np.ndarray | torch.Tensor | None,  # [R, K, k] int64
    q_probs: np.ndarray | torch.Tensor | None,  # [R, K, k] float32
    columns: SamplingColumns,  # R rows
    anchor_positions: np.ndarray | torch.Tensor,  # [R] int64
    rounds: np.ndarray | torch.Tensor | int,  # [R] int64 or one number; must differ between two visits of a position
) -> Verdict:
    """Accept the longest prefix of each draft that the target agrees with, and emit one token more.

    - greedy rows (temperature 0): a draft stands while it is the argmax (the lowest id on ties).
    - rejection rows: accept x with probability min(1, p(x) / q(x)); on rejection draw from norm(max(p - q, 0)).
      A draft for which q is absent (None, or no mass on the token) counts as proposed with certainty: accepted with
      probability p(x), else p without x. This is exact however the token came about.
    - coupled rows: the target emits argmax(log p + g) with noise shared with the drafter; a draft stands while it is
      equal. The tokens are the same whatever was drafted.
    """
    lens = host(verify_lens).astype(np.int64)
    drafts = _Drafts(
        tokens=np.pad(host(draft_tokens).astype(np.int64), ((0, 0), (0, 1))),
        lens=lens,
        first_row=np.cumsum(1 + lens) - (1 + lens),
        positions=host(anchor_positions).astype(np.int64) + 1,
        rounds=np.broadcast_to(host(np.asarray(rounds) if isinstance(rounds, int) else rounds), lens.shape),
        q_ids=None if q_ids is None else host(q_ids),
        q_probs=None if q_probs is None else host(q_probs),
    )
    assert logits.shape[0] == int((1 + lens).sum()), "one row of logits for each anchor and each admitted draft"
    verdict = Verdict(np.zeros_like(drafts.tokens), np.zeros_like(lens), np.zeros(len(lens), dtype=bool))
    _verify_greedy(verdict, logits, drafts, np.flatnonzero(columns.greedy))
    _verify_sampled(verdict, logits, drafts, columns, np.flatnonzero(~columns.greedy))
    return verdict


def _verify_greedy(verdict: Verdict, logits: torch.Tensor, drafts: _Drafts, rows: np.ndarray) -> None:
    """One argmax over the rows of logits as they are: no copy in float32, no distribution."""
    if not rows.size:
        return
    width = drafts.tokens.shape[1]
    offsets = np.minimum(np.arange(width), drafts.lens[rows, None])
    where = drafts.first_row[rows, None] + offsets  # [G, K + 1]
    used, back = np.unique(where, return_inverse=True)
    part = logits if len(used) == len(logits) else logits[torch.from_numpy(used).to(logits.device)]
    peak, winner = part.max(-1)
    chosen = host(winner)[back].reshape(where.shape)
    finite = host(torch.isfinite(peak))[back].reshape(where.shape)
    stands = (chosen[:, :-1] == drafts.tokens[rows, :-1]) & (np.arange(width - 1) < drafts.lens[rows, None])
    accepted = np.cumprod(stands, axis=1, dtype=np.int64).sum(axis=1)
    emitted = np.arange(width) <= accepted[:, None]
    verdict.tokens[rows] = np.where(emitted, chosen, 0)
    verdict.num_accepted[rows] = accepted
    verdict.failed[rows] = (emitted & ~finite).any(axis=1)


def _verify_sampled(
    verdict: Verdict, logits: torch.Tensor, drafts: _Drafts, columns: SamplingColumns, rows: np.ndarray
) -> None:
    """Position by position, for requests whose draft has stood so far: rows after a rejection cost nothing."""
    for offset in range(drafts.tokens.shape[1]):
        if not rows.size:
            return
        coupled = columns.coupled[rows]
        going_on = [
            _coupled_position(verdict, logits, drafts, columns, rows[coupled], offset),
            _rejection_position(verdict, logits, drafts, columns, rows[~coupled], offset),
        ]
        rows = np.sort(np.concatenate(going_on))
        verdict.num_accepted[rows] += 1


def _coupled_position(
    verdict: Verdict, logits: torch.Tensor, drafts: _Drafts, columns: SamplingColumns, rows: np.ndarray, offset: int
) -> np.ndarray:
    """Emit argmax(log p + g) at one position; returns the requests whose draft token is equal to it."""
    if not rows.size:
        return rows
    chosen = columns.select(rows)
    # Scores need no normaliser here, and without one nothing but the row itself can touch the last bit of a comparison.
    scores = filtered_scores(
        _rows_of(logits, drafts, rows, offset), chosen.temperature, chosen.top_k, chosen.top_p, chosen.min_p
    )
    vocabulary = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    noise = gumbel(_tensor(chosen.noise_seeds), _tensor(drafts.positions[rows] + offset), vocabulary)
    best, winner = scores.add_(noise).max(-1)
    finite = host(torch.isfinite(best))
    tokens = host(winner)
    verdict.failed[rows] |= ~finite
    verdict.tokens[rows, offset] = tokens
    return rows[finite & (offset < drafts.lens[rows]) & (tokens == drafts.tokens[rows, offset])]


def _rejection_position(
    verdict: Verdict, logits: torch.Tensor, drafts: _Drafts, columns: SamplingColumns, rows: np.ndarray, offset: int
) -> np.ndarray:
    """Accept or replace the draft token of one position; returns the requests whose draft token was accepted."""
    if not rows.size:
        return rows
    chosen = columns.select(rows)
    p = process_probs(
        _rows_of(logits, drafts, rows, offset), chosen.temperature, chosen.top_k, chosen.top_p, chosen.min_p
    )
    token = drafts.tokens[rows, offset]
    p_token = host(p.gather(1, _tensor(token).to(p.device)[:, None])[:, 0]).astype(np.float64)
    q_ids, q_probs = _sparse_q(drafts, rows, offset)
    q_token = np.where(q_ids == token[:, None], q_probs, 0.0).sum(axis=1, dtype=np.float64)
    drafted = offset < drafts.lens[rows]
    accepted = drafted & (_uniform(chosen, drafts, rows, offset, Purpose.ACCEPT) * q_token < p_token)
    verdict.tokens[rows, offset] = token
    stop = np.flatnonzero(~accepted)
    if stop.size:
        removed = np.where(drafted[stop, None], q_probs[stop], np.float32(0.0))
        points = np.where(
            drafted,
            _uniform(chosen, drafts, rows, offset, Purpose.RECOVER),
            _uniform(chosen, drafts, rows, offset, Purpose.BONUS),
        )
        p = p if len(stop) == len(rows) else p[_tensor(stop).to(p.device)]
        tokens, finite = _draw_residual(p, q_ids[stop], removed, points[stop])
        verdict.tokens[rows[stop], offset] = tokens
        verdict.failed[rows[stop]] |= ~finite
    return rows[accepted]


def _sparse_q(drafts: _Drafts, rows: np.ndarray, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """Support [n, k] and probabilities [n, k] that the token was drawn from; one-hot on it where q does not hold it."""
    token = drafts.tokens[rows, offset]
    if drafts.q_ids is None or drafts.q_probs is None or offset >= drafts.q_ids.shape[1]:
        return token[:, None], np.ones((len(rows), 1), dtype=np.float32)
    ids = drafts.q_ids[rows, offset]
    probs = np.nan_to_num(drafts.q_probs[rows, offset], nan=0.0)
    absent = ~((ids == token[:, None]) & (probs > 0.0)).any(axis=1)
    certain = np.zeros(ids.shape[1], dtype=np.float32)
    certain[0] = 1.0
    return np.where(absent[:, None], token[:, None], ids), np.where(absent[:, None], certain, probs)


def _draw_residual(
    p: torch.Tensor,  # [n, V] float32
    q_ids: np.ndarray,  # [n, k]
    q_probs: np.ndarray,  # [n, k], 0 where nothing is to be removed
    points: np.ndarray,  # [n] float64 in (0, 1)
) -> tuple[np.ndarray, np.ndarray]:
    """A token from norm(max(p - q, 0)) [n], and whether the row was finite [n]."""
    removed = torch.from_numpy(np.ascontiguousarray(-q_probs, dtype=np.float32)).to(p.device)
    weights = p.scatter_add(1, _tensor(q_ids).to(p.device), removed).clamp_(min=0.0)
    empty = weights.amax(-1, keepdim=True) <= 0.0
    if empty.any():  # p and q equal up to rounding leave nothing: then p itself is the residual
        weights = torch.where(empty, p, weights)
    return _invert_cumulative(weights, torch.from_numpy(points).to(p.device)[:, None])


def _invert_cumulative(weights: torch.Tensor, points: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The token at which the cumulative sum of weights [n, V] passes the share `points` [n, 1] of their total [n].

    In two levels, block and token, so that only block sums and one block a row are accumulated in float64.
    """
    blocks = torch.nn.functional.pad(weights, (0, -weights.shape[1] % _BLOCK)).view(len(weights), -1, _BLOCK)
    reached = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = points * reached[:, -1:]
    block = torch.searchsorted(reached, target, right=True).clamp_(max=blocks.shape[1] - 1)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].double().cumsum(-1)
    rest = target - (reached.gather(1, block) - inside[:, -1:])
    # Rounding between the two levels must not fall off the block's ends onto a token without weight.
    rest = torch.minimum(rest.clamp_(min=0.0), inside[:, -1:] * (1.0 - 2.0**-52))
    tokens = block * _BLOCK + torch.searchsorted(inside, rest, right=True).clamp_(max=_BLOCK - 1)
    finite = torch.isfinite(reached[:, -1])
    return host(torch.where(finite, tokens[:, 0], 0)), host(finite)


def _rows_of(logits: torch.Tensor, drafts: _Drafts, rows: np.ndarray, offset: int) -> torch.Tensor:
    return logits[_tensor(drafts.first_row[rows] + offset).to(logits.device)]


def _uniform(
    columns: SamplingColumns, drafts: _Drafts, rows: np.ndarray, offset: int, purpose: Purpose
) -> np.ndarray:  # [n] float64
    return uniform(
        _tensor(columns.noise_seeds),
        _tensor(drafts.positions[rows] + offset),
        purpose,
        _tensor(drafts.rounds[rows]),
        dtype=torch.float64,
    ).numpy()


def _tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
