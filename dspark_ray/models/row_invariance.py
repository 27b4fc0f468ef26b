"""Linear layers whose result for a token does not depend on how many other tokens are in the step.

A matrix product picks its kernel, and with it the order of its sums, by the number of rows; in bfloat16 the last bit
then depends on the load and on the length of a draft, and greedy texts part at near-ties. In pieces of few rows CPU
kernels for bfloat16 keep one order: verifying eight tokens gives bit for bit what computing them one by one gives.
"""

import logging
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.functional import linear

logger = logging.getLogger(__name__)

ROWS = 32  # kernels keep one order of sums up to so many rows; checked for each shape when a model is loaded
LEAST_ROWS = 2  # a single row may take a matrix-vector kernel with another order, so it is computed twice
CHECKED_RESULTS = 2**17  # of each shape: where kernels differ, only one result in some thousand rounds another way


class RowInvariantLinear(nn.Module):
    """An nn.Linear computed in pieces of LEAST_ROWS to ROWS rows. Shares the parameters of the layer it replaces."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # [..., T, in] -> [..., T, out]
        if hidden.shape[-2] <= ROWS:
            return self._piece(hidden)
        return torch.cat([self._piece(piece) for piece in hidden.split(ROWS, dim=-2)], dim=-2)

    def _piece(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.shape[-2] >= LEAST_ROWS:
            return linear(hidden, self.weight, self.bias)
        twice = hidden.expand(*hidden.shape[:-2], LEAST_ROWS, hidden.shape[-1])
        return linear(twice, self.weight, self.bias)[..., :1, :]


def make_row_invariant(model: nn.Module) -> bool:
    """Replace every linear layer; False, and a word in the log, if this machine's kernels are not invariant anyway."""
    shapes: dict[tuple[int, ...], RowInvariantLinear] = {}
    for parent, name, layer in list(_linear_layers(model)):
        invariant = RowInvariantLinear(layer)
        setattr(parent, name, invariant)
        shapes[tuple(layer.weight.shape)] = invariant
    broken = [shape for shape, layer in shapes.items() if not keeps_order(layer)]
    if broken:
        logger.warning(
            "matrix products of shapes %s depend on the number of rows on this machine: in %s, greedy and seeded "
            "output may differ at near-ties with the load and the drafts; float32 makes that rare",
            broken,
            next(iter(shapes.values())).weight.dtype,
        )
    return not broken


@torch.inference_mode()
def keeps_order(layer: RowInvariantLinear) -> bool:
    """Whether some row counts up to ROWS give each row the bits that it has alone."""
    weight = layer.weight
    generator = torch.Generator(device=weight.device).manual_seed(0)
    num_pieces = -(-CHECKED_RESULTS // (ROWS * weight.shape[0]))
    pieces = torch.randn(num_pieces, ROWS, weight.shape[1], generator=generator, device=weight.device).to(weight.dtype)
    return all(_keeps_order(layer, rows) for rows in pieces)


def _keeps_order(layer: RowInvariantLinear, rows: torch.Tensor) -> bool:
    alone = torch.cat([layer(row[None]) for row in rows])
    return all(torch.equal(layer(rows[:count]), alone[:count]) for count in (2, 8, 17, ROWS - 1, ROWS))


def _linear_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                yield parent, name, child
