"""Paged attention over packed rows against dense attention of each row alone."""

import numpy as np
import pytest
import torch

from dspark_ray.models.attention import ANY_QUERIES, QUERIES, KVCache, build_attention_batch, paged_attention

PAGE, HEADS, KV_HEADS, DIM = 4, 4, 2, 8
CPU = torch.device("cpu")


def scattered_pages(kv_lens: list[int], num_pages: int, seed: int) -> np.ndarray:
    order = np.random.default_rng(seed).permutation(num_pages)
    width = max(-(-length // PAGE) for length in kv_lens)
    table = np.zeros((len(kv_lens), width), dtype=np.int64)
    for row, length in enumerate(kv_lens):
        need = -(-length // PAGE)
        table[row, :need], order = order[:need], order[need:]
    return table


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, causal: bool) -> torch.Tensor:
    """Explicit softmax of one row: query [q, H, D] against key, value [c, G, D]."""
    key, value = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,chd->hqc", query, key) * 0.5
    if causal:
        seen = torch.arange(key.shape[0])[None, :] <= start + torch.arange(query.shape[0])[:, None]
        scores = scores.masked_fill(~seen, float("-inf"))
    return torch.einsum("hqc,chd->qhd", scores.softmax(-1), value)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sizes", [(QUERIES,), ANY_QUERIES])
@pytest.mark.parametrize("lens", [[1], [1, 8, 3], [1, QUERIES + 7, 5], [40, 33], [70, 1, 9]])
def test_packed_ragged_rows_equal_dense_attention_of_each(
    causal: bool, lens: list[int], sizes: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    starts = [9, 0, 21, 3][: len(lens)]
    kv_lens = [start + length for start, length in zip(starts, lens, strict=True)]
    table = scattered_pages(kv_lens, 64, seed=1)
    cache = KVCache(1, 64 * PAGE, KV_HEADS, DIM, torch.float32, CPU)
    for tensor in (cache.keys[0], cache.values[0]):
        tensor.fill_(float("nan"))  # pages that hold nothing must never be read
    keys = [torch.randn(length, KV_HEADS, DIM) for length in kv_lens]
    values = [torch.randn(length, KV_HEADS, DIM) for length in kv_lens]
    for row, length in enumerate(kv_lens):
        slots = torch.from_numpy(table[row, np.arange(length) // PAGE] * PAGE + np.arange(length) % PAGE)
        cache.write(0, slots, keys[row], values[row])
    query = torch.randn(sum(lens), HEADS, DIM)
    batch = build_attention_batch(table, PAGE, np.array(starts), np.array(lens), causal=causal, device=CPU, sizes=sizes)
    out = paged_attention(query, cache, 0, batch, 0.5)
    expected = torch.cat(
        [dense(part, keys[row], values[row], starts[row], causal) for row, part in enumerate(query.split(lens))]
    )
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_write_slots_follow_the_page_table() -> None:
    table = np.array([[5, 2], [7, 0]])
    batch = build_attention_batch(table, PAGE, np.array([3, 0]), np.array([2, 1]), causal=True, device=CPU)
    assert batch.write_slots.tolist() == [5 * PAGE + 3, 2 * PAGE, 7 * PAGE]
