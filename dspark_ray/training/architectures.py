"""Which training forward a draft network has: the one place where the objective meets architectures."""

from dataclasses import dataclass
from typing import Protocol

import torch

from dspark_ray.models.autoregressive_draft import AutoregressiveDraftModel, DraftNetwork
from dspark_ray.models.draft_model import DSparkDraftModel
from dspark_ray.training.anchors import AnchorBlocks
from dspark_ray.training.draft_forward import draft_hidden
from dspark_ray.training.unrolled_forward import unrolled_hidden


class TrainingForward(Protocol):
    """Hidden states of every block over teacher-forced tokens, with gradients."""

    def hidden(
        self,
        taps: torch.Tensor,  # [R, S, m * d]
        token_ids: torch.Tensor,  # [R, S] int64
        blocks: AnchorBlocks,
    ) -> torch.Tensor: ...  # [R, A, gamma, d] after the final norm


@dataclass(frozen=True, slots=True)
class WholeBlocks:
    """All positions of a block at once: DSpark and DFlash."""

    model: DSparkDraftModel

    def hidden(self, taps: torch.Tensor, token_ids: torch.Tensor, blocks: AnchorBlocks) -> torch.Tensor:
        return draft_hidden(self.model, taps, token_ids, blocks)


@dataclass(frozen=True, slots=True)
class Unrolled:
    """Position after position, each from the drafter's own output for the one before."""

    model: AutoregressiveDraftModel

    def hidden(self, taps: torch.Tensor, token_ids: torch.Tensor, blocks: AnchorBlocks) -> torch.Tensor:
        return unrolled_hidden(self.model, taps, token_ids, blocks)


def architecture_of(model: DraftNetwork) -> TrainingForward:
    return Unrolled(model) if isinstance(model, AutoregressiveDraftModel) else WholeBlocks(model)
