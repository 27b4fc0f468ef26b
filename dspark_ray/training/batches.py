"""What a drafter is trained on: sequences with the target's view of them, padded; and in which order they come.

Letters: R sequences, S padded length, m tapped layers, d hidden size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from dspark_ray.training.sequences import TrainingSequence

WINDOW_BATCHES = 16  # sequences are sorted by length within so many batches' worth: little padding, random order


@dataclass(frozen=True, slots=True)
class SequenceFeatures:
    """The target's view of one sequence of S tokens, on the CPU."""

    taps: torch.Tensor  # [S, m * d]
    last_hidden: torch.Tensor  # [S, d] after the final norm
    log_normalizers: torch.Tensor  # [S] float32, logsumexp of the target's logits (from reply_start - 1 on)


@dataclass(frozen=True, slots=True)
class PackedFeatures:
    """The features of several sequences, one behind the other: what a target actor answers."""

    lengths: tuple[int, ...]
    taps: torch.Tensor  # [T, m * d]
    last_hidden: torch.Tensor  # [T, d]
    log_normalizers: torch.Tensor  # [T]

    def split(self) -> list[SequenceFeatures]:
        """Views of each sequence."""
        parts = (tensor.split(self.lengths) for tensor in (self.taps, self.last_hidden, self.log_normalizers))
        return [SequenceFeatures(*views) for views in zip(*parts, strict=True)]


@dataclass(frozen=True, slots=True)
class SupervisedBatch:
    """Sequences with tapped and last hidden states of the target. Padding is zero and never seen."""

    token_ids: torch.Tensor  # [R, S] int64
    lengths: torch.Tensor  # [R] int64
    reply_starts: torch.Tensor  # [R] int64
    taps: torch.Tensor  # [R, S, m * d]
    last_hidden: torch.Tensor  # [R, S, d]
    log_normalizers: torch.Tensor  # [R, S] float32

    def to(self, device: torch.device) -> "SupervisedBatch":
        return SupervisedBatch(*(getattr(self, name).to(device, non_blocking=True) for name in self.__slots__))

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())


def supervised_batch(sequences: Sequence[TrainingSequence], features: Sequence[SequenceFeatures]) -> SupervisedBatch:
    """Sequences and their features, padded to the longest."""
    return SupervisedBatch(
        token_ids=pad_sequence([torch.tensor(sequence.token_ids) for sequence in sequences], batch_first=True),
        lengths=torch.tensor([len(sequence.token_ids) for sequence in sequences]),
        reply_starts=torch.tensor([sequence.reply_start for sequence in sequences]),
        taps=pad_sequence([each.taps for each in features], batch_first=True),
        last_hidden=pad_sequence([each.last_hidden for each in features], batch_first=True),
        log_normalizers=pad_sequence([each.log_normalizers for each in features], batch_first=True),
    )


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
