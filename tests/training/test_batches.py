"""Batches: whole sequences, all of them, the same after a resumption."""

from itertools import islice

import numpy as np
import torch

from dspark_ray.training.anchors import sample_anchors, supervise
from dspark_ray.training.batches import endless_batches, epoch_batches
from dspark_ray.training.sequences import TrainingSequence


def _sequences(count: int) -> list[TrainingSequence]:
    lengths = np.random.default_rng(0).integers(5, 60, count)
    return [TrainingSequence(tuple(range(length)), 2, 1.0) for length in lengths]


def test_an_epoch_holds_every_sequence_once_in_batches_of_bounded_size() -> None:
    sequences = _sequences(200)
    batches = epoch_batches(sequences, 128, seed=1, epoch=0, worker=0, num_workers=1)
    assert sorted(index for batch in batches for index in batch) == list(range(200))
    assert all(sum(len(sequences[i].token_ids) for i in batch) <= 128 for batch in batches)


def test_workers_share_an_epoch_without_overlap_and_get_equally_many_batches() -> None:
    sequences = _sequences(200)
    parts = [epoch_batches(sequences, 128, 1, 0, worker, 3) for worker in range(3)]
    assert len({len(part) for part in parts}) == 1
    seen = [index for part in parts for batch in part for index in batch]
    assert len(seen) == len(set(seen))


def test_fewer_batches_than_workers_still_feed_every_worker() -> None:
    assert all(epoch_batches(_sequences(1), 128, 0, 0, worker, 2) == [[0]] for worker in range(2))


def test_skipping_gives_the_rest_of_the_uninterrupted_order() -> None:
    sequences = _sequences(40)
    whole = list(islice(endless_batches(sequences, 128, 1, 0, 1, skip=0), 40))
    assert list(islice(endless_batches(sequences, 128, 1, 0, 1, skip=23), 17)) == whole[23:]


def test_anchors_lie_between_the_last_prompt_token_and_the_last_but_one() -> None:
    starts, lengths = np.array([1, 4, 7, 5]), np.array([12, 6, 9, 6])
    blocks = sample_anchors(np.random.default_rng(0), starts, lengths, 4)
    assert blocks.keep.sum(-1).tolist() == [4, 2, 2, 1]
    for row in range(4):
        anchors = blocks.positions[row][blocks.keep[row]].tolist()
        assert anchors == sorted(set(anchors))
        assert all(max(1, starts[row] - 1) <= anchor <= lengths[row] - 2 for anchor in anchors)


def test_supervision_ends_with_the_sequence() -> None:
    blocks = sample_anchors(np.random.default_rng(0), np.array([1]), np.array([6]), 8)
    supervision = supervise(blocks, torch.tensor([6]), 3)
    assert blocks.positions.tolist() == [[1, 2, 3, 4]]
    assert supervision.mask.sum(-1).tolist() == [[3, 3, 2, 1]]
    assert supervision.target[0, 2, :2].tolist() == [4, 5]
    assert supervision.previous[0, 2, :2].tolist() == [3, 4]
