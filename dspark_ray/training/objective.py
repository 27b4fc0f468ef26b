"""One batch through the draft network to the loss of equation 12, and what the log shows of it.

Letters: R sequences, A anchors, K draft positions, N supervised positions, V draft vocabulary, r Markov rank.
"""

from dataclasses import dataclass

import torch

from dspark_ray.models.autoregressive_draft import DraftNetwork
from dspark_ray.training.anchors import AnchorBlocks, Supervision, position_weights, supervise
from dspark_ray.training.architectures import architecture_of
from dspark_ray.training.batches import SupervisedBatch
from dspark_ray.training.losses import HeadLosses, HeadTargets, LossWeights, confidence_loss, head_losses


@dataclass(frozen=True, slots=True)
class ObjectiveSettings:
    """What the loss depends on besides model and data."""

    weights: LossWeights
    decay: float  # gamma of exp(-(k - 1) / gamma)
    head_chunk: int  # positions whose logits exist at once


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss with its gradient; acceptance and its terms are detached."""

    loss: torch.Tensor  # []
    cross_entropy: torch.Tensor  # []
    total_variation: torch.Tensor  # [] mean L1 norm
    confidence: torch.Tensor  # []
    acceptance: torch.Tensor  # [R, A, K] float32, c*; 0 where not supervised
    mask: torch.Tensor  # [R, A, K] bool


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """The frozen head, shared with the target, over the tokens that the drafter can propose."""

    head: torch.Tensor  # [V, d] in the dtype of the matmuls
    from_target: torch.Tensor | None  # [target vocabulary] int64, draft id of each token or -1; None: all tokens

    def labels(self, token_ids: torch.Tensor) -> torch.Tensor:
        return token_ids if self.from_target is None else self.from_target[token_ids]


def draft_objective(
    model: DraftNetwork,
    vocabulary: DraftVocabulary,
    batch: SupervisedBatch,
    blocks: AnchorBlocks,
    settings: ObjectiveSettings,
) -> Objective:
    """Forward pass and loss over the given anchors (paper 3.3)."""
    config = model.config
    hidden = architecture_of(model).hidden(batch.taps, batch.token_ids, blocks)
    first, num_drafts = config.first_prediction, config.max_draft_tokens
    hidden = hidden[:, :, first : first + num_drafts]  # [R, A, K, d]
    supervision = supervise(blocks, batch.lengths, num_drafts)
    previous = _gather(batch.token_ids, supervision.previous)
    latents = None if model.markov_head is None else model.markov_head.latents(previous, hidden)
    chosen = supervision.mask
    weights = position_weights(num_drafts, settings.decay).to(hidden.device).expand_as(chosen)[chosen]
    weights = weights / weights.sum().clamp(min=1e-9)
    states = (
        hidden[chosen] if latents is None else torch.cat([hidden[chosen], latents[chosen].to(hidden.dtype)], dim=-1)
    )
    losses = head_losses(
        states,
        None if model.markov_head is None else model.markov_head.markov_w2.weight,
        vocabulary.head,
        _targets(batch, supervision, vocabulary, weights),
        settings.weights,
        settings.head_chunk,
    )
    confidence = _confidence(model, hidden, previous, chosen, losses, weights)
    acceptance = torch.zeros(chosen.shape, device=chosen.device)
    acceptance[chosen] = losses.acceptance
    return Objective(
        losses.loss + settings.weights.confidence * confidence,
        losses.cross_entropy,
        losses.total_variation,
        confidence.detach(),
        acceptance,
        chosen,
    )


def _targets(
    batch: SupervisedBatch, supervision: Supervision, vocabulary: DraftVocabulary, weights: torch.Tensor
) -> HeadTargets:
    """x_k is predicted by the target from its hidden state at the place of x_{k-1}."""
    chosen = supervision.mask
    offsets = torch.arange(len(batch.token_ids), device=chosen.device)[:, None, None] * batch.token_ids.shape[1]
    dtype = vocabulary.head.dtype
    return HeadTargets(
        batch.last_hidden.flatten(0, 1).to(dtype),
        batch.log_normalizers.flatten(),
        (supervision.previous + offsets)[chosen],
        vocabulary.labels(_gather(batch.token_ids, supervision.target)[chosen]),
        weights,
    )


def _confidence(
    model: DraftNetwork,
    hidden: torch.Tensor,
    previous: torch.Tensor,
    chosen: torch.Tensor,
    losses: HeadLosses,
    weights: torch.Tensor,
) -> torch.Tensor:
    if model.confidence_head is None:
        return torch.zeros((), device=hidden.device)
    embedding = None if model.markov_head is None else model.markov_head.markov_w1(previous[chosen]).to(hidden.dtype)
    return confidence_loss(model.confidence_head(hidden[chosen], embedding), losses.acceptance, weights)


def _gather(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:  # [R, S], [R, A, K] -> [R, A, K]
    return values.gather(1, places.flatten(1)).view(places.shape)
