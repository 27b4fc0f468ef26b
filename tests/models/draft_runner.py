"""Runs a draft network over paged context for tests: each row owns scattered pages, nothing else is clever."""

from dataclasses import dataclass, field

import numpy as np
import torch

from dspark_ray.models.attention import KVCache, build_attention_batch, slots_of
from dspark_ray.models.draft_model import DSparkDraftModel, block_tokens

PAGE_SIZE = 4
PAGES = 16  # of each row


@dataclass
class DraftRunner:
    """Context lengths and pages of `num_rows` requests; free slots hold NaN, so that reading one shows."""

    model: DSparkDraftModel
    num_rows: int
    page_table: np.ndarray = field(init=False)
    lengths: np.ndarray = field(init=False)
    cache: KVCache = field(init=False)

    def __post_init__(self) -> None:
        pages = np.random.default_rng(0).permutation(self.num_rows * PAGES)
        self.page_table = pages.reshape(self.num_rows, PAGES)
        self.lengths = np.zeros(self.num_rows, dtype=np.int64)
        self.cache = self.model.new_cache(pages.size * PAGE_SIZE)
        for tensor in (*self.cache.keys, *self.cache.values):
            tensor.fill_(torch.nan)

    def append(self, row: int, features: torch.Tensor) -> None:  # [N, m * d]
        indices = self.lengths[row] + np.arange(len(features))
        slots = slots_of(self.page_table, np.full(len(indices), row), indices, PAGE_SIZE)
        self.model.append_context(
            self.model.project(features), torch.from_numpy(indices), torch.from_numpy(slots), self.cache
        )
        self.lengths[row] += len(features)

    def block(self, anchors: torch.Tensor) -> torch.Tensor:  # [R] -> [R, gamma, d]
        gamma = self.model.config.block_size
        lens = np.full(self.num_rows, gamma)
        batch = build_attention_batch(
            self.page_table, PAGE_SIZE, self.lengths, lens, causal=False, device=torch.device("cpu")
        )
        positions = torch.from_numpy(self.lengths[:, None] + np.arange(gamma))
        return self.model.forward_block(block_tokens(anchors, self.model.config), positions, batch, self.cache)


def greedy_block(
    model: DSparkDraftModel,
    hidden: torch.Tensor,  # [R, K, d]
    anchors: torch.Tensor,  # [R]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [R, K], corrected logits [R, K, V], confidence logits [R, K] of the sequential stage (eq. 4 and 7)."""
    assert model.markov_head is not None
    assert model.confidence_head is not None
    state, previous, base = model.markov_head.initial_state(len(anchors)), anchors, model.base_logits(hidden)
    tokens, corrected, confidence = [], [], []
    for k in range(hidden.shape[1]):
        bias, state = model.markov_head.step(state, previous, hidden[:, k])
        confidence.append(model.confidence_head(hidden[:, k], model.markov_head.markov_w1(previous)))
        corrected.append(base[:, k] + bias)
        previous = corrected[-1].argmax(-1)
        tokens.append(previous)
    return torch.stack(tokens, 1), torch.stack(corrected, 1), torch.stack(confidence, 1)
