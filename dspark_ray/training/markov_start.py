"""The Markov head before its first step: the corpus' bigrams, as far as its rank can hold them.

The bias that a vanilla head adds is then about log p(v|u) - log p(v) for a token v behind u. A head that starts from
zero has to learn this through a softmax over the whole vocabulary, which takes most of a short training.
"""

from collections.abc import Sequence

import numpy as np
import torch

from dspark_ray.models.autoregressive_draft import DraftNetwork
from dspark_ray.training.sequences import TrainingSequence

SMOOTHING = 20.0  # pseudo-counts of p(v) behind each u: the best of 1, 5, 20 by held-out cross-entropy
STRENGTH = 0.5  # of the bias: the backbone knows part of it, at the first position all of it
FLOOR = 0.1  # pseudo-count of each v in p(v)
MAX_TOKENS = 8192  # most frequent ones; the others start without a bias


@torch.no_grad()
def start_markov_head(model: DraftNetwork, sequences: Sequence[TrainingSequence], seed: int = 0) -> None:
    """Write the factors into a DSpark network's head; leaves other networks as they are."""
    head = model.markov_head
    if head is None or not sequences:
        return
    draft_ids = model.draft_to_target
    if draft_ids is None:
        draft_ids = torch.arange(model.config.vocab_size)
    before, behind = bigrams(sequences)
    columns = _most_frequent(behind[torch.isin(behind, draft_ids)])
    counts = _counts(before, behind, columns, model.config.vocab_size)
    if not counts.any():
        return
    left, right = bigram_factors(counts, head.rank, seed)
    head.markov_w1.weight[columns] = left
    head.markov_w2.weight[torch.searchsorted(draft_ids, columns)] = STRENGTH * right


def bigrams(sequences: Sequence[TrainingSequence]) -> tuple[torch.Tensor, torch.Tensor]:  # [P], [P] int64
    """Each reply token with the token before it."""
    replies = [np.array(each.token_ids[each.reply_start - 1 :]) for each in sequences]
    before, behind = (np.concatenate(parts) for parts in zip(*((r[:-1], r[1:]) for r in replies), strict=True))
    return torch.from_numpy(before), torch.from_numpy(behind)


def bigram_factors(
    counts: torch.Tensor,  # [n, n] float, how often column v came behind row u
    rank: int,
    seed: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # left [n, rank], right [n, rank]
    """The product left @ right.T nearest to log p(v|u) - log p(v), errors weighted by how frequent u and v are.

    `left` has a mean square of 1 over the corpus, like the random start of the embedding.
    """
    p_behind = (counts.sum(0) + FLOOR) / (counts.sum() + FLOOR * len(counts))
    rows = counts.sum(1, keepdim=True)
    information = ((counts + SMOOTHING * p_behind) / ((rows + SMOOTHING) * p_behind)).log()
    row_weights, column_weights = (rows + 1).sqrt(), p_behind.sqrt()
    torch.manual_seed(seed)
    width = min(rank, len(counts))
    u, s, v = torch.svd_lowrank(information * row_weights * column_weights, q=width, niter=3)
    left, right = u * s.sqrt() / row_weights, v * s.sqrt() / column_weights[:, None]
    size = (left.square().mean(1) * rows[:, 0]).sum().div(rows.sum()).sqrt().clamp(min=1e-6)
    pad = (0, rank - width)
    return torch.nn.functional.pad(left / size, pad), torch.nn.functional.pad(right * size, pad)


def _most_frequent(tokens: torch.Tensor) -> torch.Tensor:  # [n] int64, increasing
    ids, counts = tokens.unique(return_counts=True)
    return ids[counts.argsort(descending=True, stable=True)[:MAX_TOKENS]].sort().values


def _counts(before: torch.Tensor, behind: torch.Tensor, ids: torch.Tensor, vocab_size: int) -> torch.Tensor:  # [n, n]
    place = torch.full((vocab_size,), -1)
    place[ids] = torch.arange(len(ids))
    u, v = place[before], place[behind]
    known = (u >= 0) & (v >= 0)
    flat = torch.bincount(u[known] * len(ids) + v[known], minlength=len(ids) ** 2)
    return flat.view(len(ids), len(ids)).float()
