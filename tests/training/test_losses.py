"""The closed-form gradients of the chunked head equal autograd's of the plain definition."""

import pytest
import torch
from torch.testing import assert_close

from dspark_ray.training.losses import HeadTargets, LossWeights, head_losses

N, D, R, V, ALL = 11, 6, 3, 9, 14
WEIGHTS = LossWeights(0.3, 0.7, 1.0)


def _case(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, HeadTargets, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    whole_head, hidden = normal(ALL, D), normal(5, D)
    logits = hidden @ whole_head.T
    weights = torch.rand(N, generator=generator)
    targets = HeadTargets(
        hidden,
        logits.logsumexp(-1),
        torch.randint(0, 5, (N,), generator=generator),
        torch.randint(-1, V, (N,), generator=generator),
        weights / weights.sum(),
    )
    return normal(N, D + R), normal(V, R), whole_head[:V].contiguous(), targets, logits.softmax(-1)


def _plain(
    states: torch.Tensor, w2: torch.Tensor, head: torch.Tensor, targets: HeadTargets, p_all: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, acceptance) as equations 8 to 10 say, over the whole vocabulary."""
    q = (states[:, :D] @ head.T + states[:, D:] @ w2.T).softmax(-1)
    q_all = torch.cat([q, q.new_zeros(N, ALL - V)], dim=1)
    p = p_all[targets.rows]
    known = targets.labels >= 0
    cross_entropy = -q.gather(1, targets.labels.clamp(min=0)[:, None])[:, 0].log() * known
    terms = WEIGHTS.cross_entropy * cross_entropy + WEIGHTS.total_variation * (p - q_all).abs().sum(-1)
    return (terms * targets.weights).sum(), torch.minimum(p, q_all).sum(-1)


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_loss_acceptance_and_gradients_equal_the_plain_definition(chunk: int) -> None:
    states, w2, head, targets, p_all = _case(chunk)
    grads = []
    for run in ("chunked", "plain"):
        a, b = states.clone().requires_grad_(), w2.clone().requires_grad_()
        if run == "chunked":
            result = head_losses(a, b, head, targets, WEIGHTS, chunk)
            loss, acceptance = result.loss, result.acceptance
        else:
            loss, acceptance = _plain(a, b, head, targets, p_all)
        (2 * loss).backward()
        grads.append((loss.detach(), acceptance.detach(), a.grad, b.grad))
    for ours, theirs in zip(*grads, strict=True):
        assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_perfect_drafter_has_no_total_variation_and_acceptance_one() -> None:
    _, _, head, targets, _ = _case(0)
    whole = HeadTargets(
        targets.hidden,
        (targets.hidden @ head.T).logsumexp(-1),
        targets.rows,
        torch.full((N,), -1),
        targets.weights,
    )
    result = head_losses(targets.hidden[targets.rows], None, head, whole, WEIGHTS, 4)
    assert_close(result.acceptance, torch.ones(N), atol=1e-5, rtol=0)
    assert result.loss.item() == pytest.approx(0, abs=1e-5)
