"""Which tokens a drafter can propose, and which one stands for "not known yet". Counts of a corpus, no model."""

from collections.abc import Iterable

import numpy as np

from dspark_ray.training.sequences import TrainingSequence


def reply_token_counts(sequences: Iterable[TrainingSequence], vocab_size: int) -> np.ndarray:  # [vocab_size] int64
    counts = np.zeros(vocab_size, dtype=np.int64)
    for sequence in sequences:
        counts += np.bincount(sequence.token_ids[sequence.reply_start :], minlength=vocab_size)
    return counts


def most_frequent_tokens(counts: np.ndarray, size: int | None) -> list[int] | None:
    """Ids of the `size` most frequent tokens, increasing; None where that is all of them. Ties: the lower id."""
    if size is None or size >= len(counts):
        return None
    return sorted(np.argsort(-counts, kind="stable")[:size].tolist())


def rarest_token(counts: np.ndarray) -> int:
    """The token a mask is least likely to be mistaken for: the least frequent one, of several the highest id."""
    return int(len(counts) - 1 - np.argmin(counts[::-1]))


def coverage(counts: np.ndarray, token_ids: list[int] | None) -> float:
    """Share of the counted tokens that are in the draft vocabulary."""
    return 1.0 if token_ids is None else float(counts[token_ids].sum() / max(1, counts.sum()))
