"""The sequential heads (paper equations 4 to 6) and the confidence head (equation 7)."""

import pytest
import torch
from torch.testing import assert_close

from dspark_ray.models.draft_config import MarkovHeadType
from dspark_ray.models.heads import ConfidenceHead, MarkovHead

VOCAB, RANK, HIDDEN, K = 11, 4, 6, 5
HEADS: list[MarkovHeadType] = ["vanilla", "gated", "rnn"]


def _head(head_type: MarkovHeadType) -> MarkovHead:
    torch.manual_seed(0)
    return MarkovHead(head_type, VOCAB, VOCAB, RANK, HIDDEN).requires_grad_(False)


@pytest.mark.parametrize("head_type", HEADS)
def test_stepping_equals_teacher_forcing(head_type: MarkovHeadType) -> None:
    head = _head(head_type)
    previous, hidden = torch.randint(VOCAB, (3, K)), torch.randn(3, K, HIDDEN)
    state, biases = head.initial_state(3), []
    for k in range(K):
        bias, state = head.step(state, previous[:, k], hidden[:, k])
        biases.append(bias)
    assert_close(torch.stack(biases, dim=1), head(previous, hidden))


def test_vanilla_bias_is_the_low_rank_transition_matrix() -> None:
    head = _head("vanilla")
    transition = head.markov_w1.weight @ head.markov_w2.weight.T  # equation 5: B = W1 W2
    bias, _ = head.step(head.initial_state(2), torch.tensor([3, 7]), torch.randn(2, HIDDEN))
    assert_close(bias, transition[[3, 7]])


def test_gated_bias_closes_with_its_gate() -> None:
    head = _head("gated")
    head.gate_proj.weight.zero_()
    head.gate_proj.bias.fill_(-100.0)
    bias, _ = head.step(head.initial_state(1), torch.tensor([3]), torch.randn(1, HIDDEN))
    assert_close(bias, torch.zeros_like(bias))
    head.gate_proj.bias.fill_(100.0)
    bias, _ = head.step(head.initial_state(1), torch.tensor([3]), torch.randn(1, HIDDEN))
    assert_close(bias, head.markov_w2(head.markov_w1.weight[3:4]))


def test_only_the_rnn_head_remembers_tokens_before_the_last() -> None:
    hidden = torch.randn(1, 2, HIDDEN)
    for head_type in HEADS:
        head = _head(head_type)
        one, other = (head(torch.tensor([[first, 5]]), hidden)[0, 1] for first in (1, 2))
        assert torch.equal(one, other) == (head_type != "rnn")


def test_biases_never_depend_on_later_tokens() -> None:
    hidden = torch.randn(1, K, HIDDEN)
    for head_type in HEADS:
        head = _head(head_type)
        one = head(torch.tensor([[1, 2, 3, 4, 5]]), hidden)
        other = head(torch.tensor([[1, 2, 9, 9, 9]]), hidden)
        assert torch.equal(one[:, :2], other[:, :2])
        assert not torch.equal(one[:, 2], other[:, 2])


def test_confidence_takes_the_markov_embedding_only_if_built_with_it() -> None:
    hidden, embedding = torch.randn(2, K, HIDDEN), torch.randn(2, K, RANK)
    with_markov, without = ConfidenceHead(HIDDEN, RANK), ConfidenceHead(HIDDEN, 0)
    assert with_markov(hidden, embedding).shape == (2, K)
    assert_close(without(hidden, embedding), without(hidden))
    with pytest.raises(AssertionError, match="Markov embedding"):
        with_markov(hidden)
