"""What a drafter is trained on: sequences with the target's view of them, padded; and in which order they come.

Letters: R sequences, S padded length, m tapped layers, d hidden size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dspark_ray.training.sequences import TrainingSequence

WINDOW_BATCHES = 16  # sequences are sorted by length within so many batches' worth: little padding, random order


@dataclass(frozen=True, slots=True)
class SupervisedBatch:
    """Sequences with tapped and last hidden states of the target. Padding is zero and never seen."""

    token_ids: torch.Tensor  # [R, S] int64
    lengths: torch.Tensor  # [R] int64
    reply_starts: torch.Tensor  # [R] int64
    taps: torch.Tensor  # [R, S, m * d]
    last_hidden: torch.Tensor  # [R, S, d] after the final norm
    log_normalizers: torch.Tensor  # [R, S] float32, logsumexp of the target's logits (from reply_start - 1 on)

    def to(self, device: torch.device) -> "SupervisedBatch":
        return SupervisedBatch(*(getattr(self, name).to(device, non_blocking=True) for name in self.__slots__))

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())


def epoch_batches(
    sequences: Sequence[TrainingSequence], tokens_per_batch: int, seed: int, epoch: int, worker: int, num_workers: int
) -> list[list[int]]:
    """Indices of the sequences of each batch of one epoch for one worker; every worker gets as many batches.

    Shuffled by (seed, epoch) alone, so that a resumed run sees what the interrupted one would have seen.
    """
    order = np.random.default_rng((seed, epoch)).permutation(len(sequences))
    lengths = np.array([len(sequence.token_ids) for sequence in sequences])
    mean_batch = max(1, int(tokens_per_batch / lengths.mean()))
    batches: list[list[int]] = []
    for start in range(0, len(order), mean_batch * WINDOW_BATCHES):
        window = order[start : start + mean_batch * WINDOW_BATCHES]
        batches.extend(_filled(window[np.argsort(lengths[window], kind="stable")], lengths, tokens_per_batch))
    batches = [batches[i] for i in np.random.default_rng((seed, epoch, 1)).permutation(len(batches))]
    if len(batches) < num_workers:
        batches = batches * num_workers
    return batches[worker : len(batches) - len(batches) % num_workers : num_workers]


def endless_batches(
    sequences: Sequence[TrainingSequence], tokens_per_batch: int, seed: int, worker: int, num_workers: int, skip: int
) -> Iterator[list[int]]:
    """Epoch after epoch; the first `skip` batches are left out (those that a resumed run has had)."""
    epoch = 0
    while True:
        batches = epoch_batches(sequences, tokens_per_batch, seed, epoch, worker, num_workers)
        yield from batches[skip:]
        skip = max(0, skip - len(batches))
        epoch += 1


def _filled(indices: np.ndarray, lengths: np.ndarray, tokens_per_batch: int) -> list[list[int]]:
    """Consecutive runs of at most `tokens_per_batch` tokens, or of one sequence that alone has more."""
    runs: list[list[int]] = []
    room = 0
    for index in indices.tolist():
        if lengths[index] > room:
            runs.append([])
            room = tokens_per_batch
        runs[-1].append(index)
        room -= int(lengths[index])
    return runs
