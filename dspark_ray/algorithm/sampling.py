"""The one pipeline from logits to a distribution: temperature, top-k, top-p, min-p, in this order.

Both sides use it, the target over the vocabulary and the drafter over its top candidates, with and without speculation.
Stages that depend on a request's history (penalties, bias, grammar masks) act on the logits before they come here.
Knows nothing of drafts and acceptance. Letters: N or R rows, V vocabulary, k candidates.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from dspark_ray.algorithm.columns import SamplingColumns
from dspark_ray.algorithm.noise import gumbel

_BLOCK = 64
_FIRST_WIDTH = 128
_TINY = torch.finfo(torch.float32).tiny

Column = np.ndarray | torch.Tensor  # [N], one entry a row; best on the host, where the switches are decided


@dataclass(frozen=True, slots=True)
class DraftSample:
    """One draft position of R requests. q is only meaningful for rejection rows; k is 1 where no row is one."""

    tokens: torch.Tensor  # [R] int64
    q_ids: torch.Tensor  # [R, k] int64
    q_probs: torch.Tensor  # [R, k] float32, the very tensor that the token was drawn from
    top_prob: torch.Tensor  # [R] float32, max_v q(v): a confidence that does not depend on the token drawn


def process_logits(
    logits: torch.Tensor, temperature: Column, top_k: Column, top_p: Column, min_p: Column
) -> torch.Tensor:  # [N, V] float32
    """Log-probabilities of the processed distribution, -inf where a token is excluded.

    Args: logits [N, V] of any float dtype; temperature 0 is greedy (a one-hot on the lowest argmax); top_k <= 0,
    top_p 1 and min_p 0 are off. A row with NaN, +inf or no finite entry comes out as NaN and leaves the others alone.
    """
    return filtered_scores(logits, temperature, top_k, top_p, min_p).log_softmax(-1)


def process_probs(
    logits: torch.Tensor, temperature: Column, top_k: Column, top_p: Column, min_p: Column
) -> torch.Tensor:  # [N, V] float32
    """`process_logits` as probabilities, 0 where a token is excluded (the exponential of -inf is slow on CPUs)."""
    return filtered_scores(logits, temperature, top_k, top_p, min_p).softmax(-1)


def filtered_scores(
    logits: torch.Tensor,  # [N, V]
    temperature: Column,
    top_k: Column,
    top_p: Column,
    min_p: Column,
    log_mass: torch.Tensor | None = None,  # [N]
) -> torch.Tensor:  # [N, V] float32
    """`process_logits` before normalisation: the peak of each row is 0, excluded tokens are -inf.

    Tokens that tie with the last one kept by a filter are kept too: no filter looks at ids. `log_mass` is the
    logarithm of the sum of exp(scores) over the full vocabulary, where `logits` holds only the top of it.
    """
    temperature, top_k, top_p, min_p = (host(column) for column in (temperature, top_k, top_p, min_p))
    sampled = temperature != 0.0
    scores = logits.to(torch.float32, copy=True)
    # Peak first, then temperature: dividing 1e4 by 1e-6 first would lose the differences to rounding.
    scores.sub_(scores.amax(-1, keepdim=True))
    if (sampled & (temperature != 1.0)).any():
        scores.div_(_column(np.where(sampled, temperature, 1.0), scores))
    width = scores.shape[1]
    _on_rows(scores, sampled & (top_k > 0) & (top_k < width), lambda part, rows: _mask_top_k(part, top_k[rows]))
    _on_rows(
        scores,
        sampled & (top_p < 1.0),
        lambda part, rows: _mask_top_p(part, top_p[rows], None if log_mass is None else _take(log_mass, rows)),
    )
    _on_rows(
        scores,
        sampled & (min_p > 0.0),
        lambda part, rows: part.masked_fill_(part < _column(np.log(np.maximum(min_p[rows], 1e-38)), part), -torch.inf),
    )
    _on_rows(scores, ~sampled, lambda part, rows: _one_hot_scores(part))
    return scores


def process_candidates(
    logits: torch.Tensor,  # [N, k], the k largest of each row, descending
    temperature: Column,
    top_k: Column,
    top_p: Column,
    min_p: Column,
    log_mass: torch.Tensor | None = None,  # [N]
) -> torch.Tensor:  # [N, k] float32
    """Probabilities of the pipeline on a truncated support, renormalised: the drafter's q.

    With `log_mass` (see `full_log_mass`) top-p means the same nucleus as over the full vocabulary; without it the
    nucleus of the truncated distribution. Either is exact: q is whatever is drawn from.
    """
    return filtered_scores(logits, temperature, top_k, top_p, min_p, log_mass).softmax(-1)


def full_log_mass(logits: torch.Tensor, temperature: Column) -> torch.Tensor:
    """log sum exp((logits - peak) / temperature) of each row [N], for `process_candidates`."""
    temperature = host(temperature)
    scores = logits.to(torch.float32, copy=True)
    scores.sub_(scores.amax(-1, keepdim=True))
    return scores.div_(_column(np.where(temperature > 0.0, temperature, 1.0), scores)).exp_().sum(-1).log_()


def sample_draft(
    logits: torch.Tensor,  # [R, V]
    columns: SamplingColumns,  # R rows
    positions: Column,  # [R] int64, position of the token being drawn
    generator: torch.Generator,
    k: int = 64,
    vocabulary: torch.Tensor | None = None,  # [V] int64, the token of each column of a pruned draft vocabulary
) -> DraftSample:
    """Draw one draft token a row: argmax (greedy), from q (rejection), or argmax(log q + g) (coupled).

    q is the processed distribution over the k largest logits, renormalised. For rejection rows this keeps q small on
    the wire and exact. For coupled rows it is a choice of speed: noise for k tokens instead of V, at the price of the
    few drafts that would have come from the tail; the output does not depend on it. Logits that are not finite yield
    some draft, never an error: the target rejects what it does not like. Over a pruned vocabulary every draw is the one
    of the whole vocabulary with -inf at the tokens it lacks, without a pass over these.
    """
    greedy = columns.greedy
    if greedy.all():
        return _greedy_draft(logits, vocabulary)
    values, places = largest(logits, min(k, logits.shape[1]))
    ids = _named(places, vocabulary)
    values = values.to(torch.float32)
    values = torch.where(torch.isfinite(values[:, :1]), values, torch.zeros_like(values))
    # Greedy rows get the plain softmax here: their confidence must not be the 1.0 of a one-hot.
    filters = (
        np.where(greedy, np.float32(1.0), columns.temperature),
        np.where(greedy, 0, columns.top_k),
        np.where(greedy, np.float32(1.0), columns.top_p),
        np.where(greedy, np.float32(0.0), columns.min_p),
    )
    probs = process_candidates(values, *filters, _nucleus_mass(logits, values, *filters[:3]))
    choice = (probs / _exponential(probs, generator)).argmax(-1)
    shared = np.flatnonzero(columns.coupled & ~greedy)
    if shared.size:
        rows = _index(shared, probs)
        noise = gumbel(_host_tensor(columns.noise_seeds[shared]), _host_tensor(host(positions)[shared]), ids[rows])
        choice[rows] = (probs[rows].log() + noise).argmax(-1)
    tokens = ids.gather(1, choice[:, None])[:, 0]
    if greedy.any():
        rows = _index(np.flatnonzero(greedy), probs)
        tokens[rows] = _named(logits[rows].max(-1).indices, vocabulary)
    top_prob = probs.amax(-1)
    if (greedy | columns.coupled).all():
        return DraftSample(tokens, tokens[:, None], torch.ones_like(probs[:, :1]), top_prob)
    return DraftSample(tokens, ids, probs, top_prob)


def largest(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest entries of each row, descending, and where they are: `topk` without touching most of a wide row.

    The k largest lie in the k blocks with the largest maxima, so only those blocks are searched.
    """
    rows, width = values.shape
    if width % _BLOCK or k * _BLOCK * 2 > width:
        top = values.topk(k, dim=-1)
        return top.values, top.indices
    blocks = values.view(rows, width // _BLOCK, _BLOCK)
    chosen = blocks.amax(-1).topk(k, dim=-1, sorted=False).indices
    pool = blocks.gather(1, chosen[:, :, None].expand(-1, -1, _BLOCK)).reshape(rows, k * _BLOCK)
    top = pool.topk(k, dim=-1)
    return top.values, chosen.gather(1, top.indices // _BLOCK) * _BLOCK + top.indices % _BLOCK


def host(column: Column) -> np.ndarray:
    """A column as numpy on the host."""
    return column.detach().cpu().numpy() if isinstance(column, torch.Tensor) else np.asarray(column)


def _named(indices: torch.Tensor, vocabulary: torch.Tensor | None) -> torch.Tensor:
    return indices if vocabulary is None else vocabulary[indices]


def _greedy_draft(logits: torch.Tensor, vocabulary: torch.Tensor | None) -> DraftSample:
    peak, indices = logits.max(-1)
    tokens = _named(indices, vocabulary)
    top_prob = (peak.to(torch.float32) - logits.to(torch.float32).logsumexp(-1)).exp()
    return DraftSample(tokens, tokens[:, None], torch.ones_like(top_prob)[:, None], top_prob)


def _nucleus_mass(
    logits: torch.Tensor, values: torch.Tensor, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray
) -> torch.Tensor | None:
    """What the mass of top-p is measured against [R]; None where no row needs the pass over the full vocabulary."""
    inside = (top_k > 0) & (top_k <= values.shape[1])  # top-k leaves nothing outside the candidates
    if not ((top_p < 1.0) & ~inside).any():
        return None
    full = full_log_mass(logits, temperature)
    kept = filtered_scores(values, temperature, top_k, np.ones_like(top_p), np.zeros_like(top_p)).logsumexp(-1)
    return torch.where(torch.from_numpy(inside).to(full.device), kept, full)


def _exponential(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Exponential noise: argmax(q / E) is a draw from q, and unlike `multinomial` never raises on a bad row."""
    noise = torch.empty(like.shape, dtype=torch.float32, device=generator.device)
    return noise.exponential_(generator=generator).clamp_(min=_TINY).to(like.device)


def _on_rows(
    scores: torch.Tensor, mask: np.ndarray, change: Callable[[torch.Tensor, np.ndarray], torch.Tensor]
) -> None:
    """Apply `change` in place to the masked rows only; without any, do nothing."""
    rows = np.flatnonzero(mask)
    if rows.size == len(mask):
        change(scores, rows)
    elif rows.size:
        where = _index(rows, scores)
        scores[where] = change(scores[where], rows)


def _mask_top_k(scores: torch.Tensor, top_k: np.ndarray) -> torch.Tensor:
    values, _ = largest(scores, int(top_k.max()))
    last_kept = values.gather(1, _index(top_k - 1, scores)[:, None])
    return scores.masked_fill_(scores < last_kept, -torch.inf)


def _mask_top_p(scores: torch.Tensor, top_p: np.ndarray, log_mass: torch.Tensor | None) -> torch.Tensor:
    # The peak is 0, so its log-probability is minus the log mass; logsumexp would take the slow exponential of -inf.
    mass = -scores.log_softmax(-1).amax(-1) if log_mass is None else log_mass
    return scores.masked_fill_(scores < _nucleus_edge(scores, mass, _column(top_p, scores))[:, None], -torch.inf)


def _nucleus_edge(scores: torch.Tensor, log_mass: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The least score in the smallest set of top tokens whose mass reaches top_p [N].

    Only the top few are sorted; rows that these do not cover are widened.
    """
    edge = torch.empty_like(log_mass)
    open_rows = torch.arange(len(scores), device=scores.device)
    width = _FIRST_WIDTH
    while len(open_rows):
        width = min(width, scores.shape[1])
        values, _ = largest(scores[open_rows], width)
        reached = (values - log_mass[open_rows, None]).double().exp().cumsum(-1)
        # A token is kept while the mass before it is short of top_p; the first always is.
        before = torch.nn.functional.pad(reached[:, :-1], (1, 0))
        edge[open_rows] = values.masked_fill(before >= top_p[open_rows], torch.inf).amin(-1)
        uncovered = reached[:, -1] < top_p[open_rows, 0]
        open_rows = open_rows[uncovered] if width < scores.shape[1] else open_rows[:0]
        width *= 8
    return edge


def _one_hot_scores(scores: torch.Tensor) -> torch.Tensor:
    peak, winner = scores.max(-1, keepdim=True)
    # peak - peak is 0, or NaN where the row is not finite.
    return scores.fill_(-torch.inf).scatter_(1, winner, peak - peak)


def _column(values: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """[N] host values as a float32 [N, 1] beside `like`."""
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(like.device)[:, None]


def _take(values: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    return values[_index(rows, values)]


def _index(rows: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return _host_tensor(rows).to(like.device)


def _host_tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
