"""The training objective of equations 8 to 12: cross-entropy, total variation, confidence.

`head_losses` applies the LM head in chunks and takes the gradient in closed form at once, so that no more than a chunk
of logits ever exists. Letters: N supervised draft positions, V draft vocabulary, d hidden size, r Markov rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits


@dataclass(frozen=True, slots=True)
class HeadTargets:
    """What the head is held against at each position: the target's distribution and the token of the sequence.

    The target's probability of token v is exp(hidden . weight[v] - log_normalizer); what it gives to tokens outside a
    pruned draft vocabulary is the remainder to 1.
    """

    hidden: torch.Tensor  # [M, d] the target's last hidden states, after its final norm
    log_normalizers: torch.Tensor  # [M] float32, logsumexp over the target's whole vocabulary
    rows: torch.Tensor  # [N] int64, which of the M each position is held against
    labels: torch.Tensor  # [N] int64, draft id of the token; -1 outside the draft vocabulary: no cross-entropy
    weights: torch.Tensor  # [N] float32, summing to 1


@dataclass(frozen=True, slots=True)
class LossWeights:
    """Equation 12. `total_variation` weighs the whole L1 norm, as the reference code does (twice equation 10)."""

    cross_entropy: float = 0.1
    total_variation: float = 0.9
    confidence: float = 1.0


@dataclass(frozen=True, slots=True)
class HeadLosses:
    """`loss` carries the gradient of cross-entropy and total variation; the rest is detached."""

    loss: torch.Tensor  # []
    acceptance: torch.Tensor  # [N] float32, c* of equation 8: sum over v of min(p, q)
    cross_entropy: torch.Tensor  # [] weighted mean
    total_variation: torch.Tensor  # [] weighted mean of the L1 norm


def head_losses(
    states: torch.Tensor,  # [N, d + r] draft hidden state and Markov latent (r = 0: no Markov head)
    markov_w2: torch.Tensor | None,  # [V, r] trained
    head: torch.Tensor,  # [V, d] frozen, shared with the target
    targets: HeadTargets,
    weights: LossWeights,
    chunk: int,
) -> HeadLosses:
    """Cross-entropy and total variation over the draft vocabulary; memory is that of `chunk` rows of logits."""
    loss, *rest = _ChunkedHead.apply(states, markov_w2, head, targets, weights, chunk)
    return HeadLosses(loss, *rest)


def confidence_loss(logits: torch.Tensor, acceptance: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Equation 11 against the analytic acceptance rate. Args: all [N], weights summing to 1."""
    losses = binary_cross_entropy_with_logits(logits.float(), acceptance.clamp(0, 1), reduction="none")
    return (losses * weights).sum()


class _ChunkedHead(torch.autograd.Function):
    """d loss / d logits = w (ce (q - onehot) + tv q (s - sum_v s q)) with s = sign(q - p)."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        markov_w2: torch.Tensor | None,
        head: torch.Tensor,
        targets: HeadTargets,
        weights: LossWeights,
        chunk: int,
    ) -> tuple[torch.Tensor, ...]:
        matrix = head if markov_w2 is None else torch.cat([head, markov_w2.detach().to(head.dtype)], dim=1)
        hidden_size = head.shape[1]
        low = states.detach().to(head.dtype)
        grad_states = torch.empty_like(low)
        rank = low.shape[1] - hidden_size
        grad_w2 = torch.zeros(len(head), rank, dtype=torch.float32, device=head.device)
        acceptance, losses = torch.empty(len(low), device=low.device), torch.empty(2, len(low), device=low.device)
        for start in range(0, len(low), chunk):
            part = slice(start, start + chunk)
            rows = targets.rows[part]
            p = (targets.hidden[rows] @ head.T).float().sub_(targets.log_normalizers[rows, None]).exp_()
            logits = (low[part] @ matrix.T).float()
            grad, acceptance[part], losses[:, part] = _chunk_gradient(
                p, logits, targets.labels[part], targets.weights[part], weights
            )
            grad = grad.to(head.dtype)
            torch.mm(grad, matrix, out=grad_states[part])
            if rank:
                grad_w2 += grad.T @ low[part, hidden_size:]
        ctx.save_for_backward(grad_states, grad_w2)
        ctx.has_markov = markov_w2 is not None
        cross_entropy, total_variation = losses @ targets.weights
        loss = weights.cross_entropy * cross_entropy + weights.total_variation * total_variation
        ctx.mark_non_differentiable(acceptance, cross_entropy, total_variation)
        return loss, acceptance, cross_entropy, total_variation

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, *unused: Any) -> tuple[torch.Tensor | None, ...]:
        grad_states, grad_w2 = ctx.saved_tensors
        return grad_states * grad_loss, grad_w2 * grad_loss if ctx.has_markov else None, None, None, None, None


def _chunk_gradient(
    p: torch.Tensor,  # [n, V] over the draft vocabulary; destroyed
    logits: torch.Tensor,  # [n, V]; destroyed
    labels: torch.Tensor,  # [n]
    position_weights: torch.Tensor,  # [n]
    weights: LossWeights,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(d loss / d logits [n, V], acceptance [n], cross-entropy and L1 norm [2, n])."""
    known = labels >= 0
    picked = labels.clamp(min=0)[:, None]
    log_normalizers = torch.logsumexp(logits, dim=-1, keepdim=True)
    cross_entropy = torch.where(known, (log_normalizers - logits.gather(1, picked))[:, 0], 0.0)
    q = logits.sub_(log_normalizers).exp_()
    outside = (1 - p.sum(-1)).clamp_(min=0)
    difference = torch.sub(q, p, out=p)
    total_variation = difference.abs().sum(-1) + outside
    signs = difference.sign_()
    expected_sign = torch.linalg.vecdot(signs, q)
    ce_weights = weights.cross_entropy * known
    # q (ce + tv (s - E s)) - ce onehot, built in place of the signs
    signs.mul_(weights.total_variation).add_((ce_weights - weights.total_variation * expected_sign)[:, None])
    grad = signs.mul_(q)
    grad.scatter_add_(1, picked, -ce_weights[:, None])
    grad.mul_(position_weights[:, None])
    return grad, 1 - total_variation / 2, torch.stack([cross_entropy, total_variation])
