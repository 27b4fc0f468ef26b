"""The frozen target's view of training sequences: tapped hidden states, last hidden states, logsumexp of its logits.

A plain class; feature_stream.py wraps it in an actor. Letters: T packed tokens, m tapped layers, d hidden size.
"""

from collections.abc import Sequence

import numpy as np
import torch

from dspark_ray.models.attention import ANY_QUERIES, build_attention_batch
from dspark_ray.models.draft_config import check_layer_range
from dspark_ray.models.resolve import resolve_model
from dspark_ray.models.target import TargetModel, resolve_device, resolve_dtype
from dspark_ray.training.batches import PackedFeatures
from dspark_ray.training.config import TeacherConfig
from dspark_ray.training.sequences import TrainingSequence

PAGE_SIZE = 16
NORMALIZER_ROWS = 128  # logits over the whole vocabulary exist for so many tokens at once


class FeatureExtractor:
    """Runs the target over whole sequences, packed, at most `max_batch_tokens` at once."""

    def __init__(self, config: TeacherConfig, target_layer_ids: tuple[int, ...]) -> None:
        folder = str(resolve_model(config.model))
        self._device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, self._device)
        self._model = TargetModel.load(folder, dtype=dtype, device=self._device)
        check_layer_range(target_layer_ids, self._model.num_layers)
        self._model.tap(target_layer_ids)
        self._max_batch_tokens = config.max_batch_tokens
        self._cache = self._model.allocate(1, PAGE_SIZE)

    def extract(self, sequences: Sequence[TrainingSequence]) -> PackedFeatures:
        """Features of all tokens, on the CPU in the target's dtype."""
        groups = [self._run(group) for group in _groups(sequences, self._max_batch_tokens)]
        last, taps, normalizers = (torch.cat(parts) for parts in zip(*groups, strict=True))
        return PackedFeatures(tuple(len(sequence.token_ids) for sequence in sequences), taps, last, normalizers)

    def _run(
        self, sequences: Sequence[TrainingSequence]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # [T, d], [T, m * d], [T]
        lengths = np.array([len(sequence.token_ids) for sequence in sequences])
        pages = -(-lengths // PAGE_SIZE)
        if pages.sum() * PAGE_SIZE > len(self._cache.keys[0]):
            self._cache = self._model.allocate(int(pages.sum()), PAGE_SIZE)
        first_pages = np.cumsum(pages) - pages
        table = first_pages[:, None] + np.minimum(np.arange(pages.max()), pages[:, None] - 1)
        batch = build_attention_batch(
            table,
            PAGE_SIZE,
            np.zeros_like(lengths),
            lengths,
            causal=True,
            device=self._device,
            sizes=ANY_QUERIES,
        )
        ids = torch.from_numpy(np.concatenate([sequence.token_ids for sequence in sequences])).to(self._device)
        positions = torch.cat([torch.arange(length, device=self._device) for length in lengths])
        last, taps = self._model.hidden_states(ids, positions, self._cache, batch)
        assert taps is not None
        return last.cpu(), taps.cpu(), self._normalizers(last, sequences).cpu()

    @torch.inference_mode()
    def _normalizers(self, last: torch.Tensor, sequences: Sequence[TrainingSequence]) -> torch.Tensor:  # [T] float32
        """Only where the target predicts a reply token; 0 elsewhere."""
        wanted = torch.cat(
            [torch.arange(len(sequence.token_ids)) >= sequence.reply_start - 1 for sequence in sequences]
        ).to(last.device)
        rows = last[wanted]
        head = self._model.head_weight
        values = [(part @ head.T).float().logsumexp(-1) for part in rows.split(NORMALIZER_ROWS)]
        out = torch.zeros(len(last), dtype=torch.float32, device=last.device)
        out[wanted] = torch.cat(values)
        return out


def _groups(sequences: Sequence[TrainingSequence], max_tokens: int) -> list[list[TrainingSequence]]:
    groups: list[list[TrainingSequence]] = []
    room = 0
    for sequence in sequences:
        if len(sequence.token_ids) > room:
            groups.append([])
            room = max_tokens
        groups[-1].append(sequence)
        room -= len(sequence.token_ids)
    return groups
