"""The sequential stage and the confidence head of a DSpark drafter (paper 3.1 and 3.2.1). Knows no backbone.

Tensor names are DeepSpec's, so that state dicts load as they are. Letters: K draft positions, V vocabulary of the
drafter, r Markov rank, d hidden size.
"""

import torch
from torch import nn

from dspark_ray.models.draft_config import MarkovHeadType


class MarkovHead(nn.Module):
    """Transition bias B_k(x_<k, .) of equation 4, added to the base logits; one module for the three head types.

    vanilla (equation 5): W2 W1[x_{k-1}]. gated: the embedding is first gated elementwise by
    sigma(W_gate [h_k ; W1[x_{k-1}]]). rnn (equation 6): a gated recurrent state over the block.
    """

    def __init__(
        self, head_type: MarkovHeadType, vocab_size: int, draft_vocab_size: int, rank: int, hidden_size: int
    ) -> None:
        super().__init__()
        self.head_type = head_type
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        if head_type == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif head_type == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def initial_state(self, *shape: int) -> torch.Tensor:  # [*shape, r]
        """s_0 of equation 6: zero. The memoryless heads hand it through."""
        return self.markov_w1.weight.new_zeros(*shape, self.rank)

    def step(
        self,
        state: torch.Tensor,  # [..., r] s_{k-1}
        previous: torch.Tensor,  # [...] int64, x_{k-1} (the anchor at k = 1), target vocabulary
        hidden: torch.Tensor,  # [..., d] h_k
    ) -> tuple[torch.Tensor, torch.Tensor]:  # bias [..., V], s_k [..., r]
        latent, state = self._latent(state, self.markov_w1(previous), hidden)
        return self.markov_w2(latent), state

    def latents(
        self,
        previous: torch.Tensor,  # [..., K] int64, x_0 .. x_{K-1}
        hidden: torch.Tensor,  # [..., K, d]
    ) -> torch.Tensor:  # [..., K, r]
        """What W2 turns into the biases of a block whose tokens are known (teacher forcing, for training)."""
        embeddings = self.markov_w1(previous)
        state = self.initial_state(*previous.shape[:-1])
        if self.head_type != "rnn":  # memoryless: all positions at once
            return self._latent(state, embeddings, hidden)[0]
        latents = []
        for k in range(previous.shape[-1]):
            latent, state = self._latent(state, embeddings[..., k, :], hidden[..., k, :])
            latents.append(latent)
        return torch.stack(latents, dim=-2)

    def forward(self, previous: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:  # [..., K, V]
        """Biases of a block whose tokens are known; arguments as for `latents`."""
        return self.markov_w2(self.latents(previous, hidden))

    def _latent(
        self, state: torch.Tensor, embedding: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.head_type == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedding], dim=-1)))
            return gate * embedding, state
        if self.head_type == "rnn":
            joint = self.joint_proj(torch.cat([state, embedding, hidden], dim=-1))
            gate, candidate, output = joint.chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)
        return embedding, state


class ConfidenceHead(nn.Module):
    """Logit of c_k (equation 7) from h_k and, with a Markov embedding, from W1[x_{k-1}]; never from x_k itself."""

    def __init__(self, hidden_size: int, rank: int) -> None:
        """`rank` 0: without Markov embedding."""
        super().__init__()
        self.with_markov = rank > 0
        self.proj = nn.Linear(hidden_size + rank, 1)

    def forward(
        self,
        hidden: torch.Tensor,  # [..., d]
        embedding: torch.Tensor | None = None,  # [..., r] W1[x_{k-1}]
    ) -> torch.Tensor:  # [...]
        if self.with_markov:
            assert embedding is not None, "this confidence head needs the Markov embedding"
            hidden = torch.cat([hidden, embedding], dim=-1)
        return self.proj(hidden).squeeze(-1)
