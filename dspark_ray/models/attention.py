"""Paged attention over packed rows: where each token's K/V is written, and which slots each query may see.

One packed row of tokens holds prefill chunks and verify prefixes of every request (paper 5.3: the token axis is never
padded). Used by the target through transformers' AttentionInterface and by the drafter for its context cache.
Letters: T packed tokens, R requests, P pages a row, H query heads, G key/value heads, D head size, L layers;
a slot is one token's place in the pages.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

# Rows are cut into pieces of so many query tokens, the last one padded. One size: the shapes of a row do not depend on
# what else is in a step or in the row, so neither does a token's result, since kernels choose the order of their sums
# by shape (see row_invariance.py). Several sizes: each row takes the least that holds it, else the largest; faster for
# plain decoding and long prompts.
QUERIES = 8
ANY_QUERIES = (1, QUERIES, 64)
CONTEXT_MULTIPLE = 64  # contexts are padded to a multiple of it
BUCKET_FACTOR = 4  # pieces attend together if their contexts differ by less than this factor


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Pieces of rows, of one size Q, whose contexts are padded to one length and that attend in one call."""

    query_index: torch.Tensor  # [R, Q] int64, index into the packed axis (a real index also where padded)
    query_flat: torch.Tensor  # [n] int64, places of the real queries in the flattened [R * Q]
    packed: torch.Tensor  # [n] int64, their packed indices
    kv_slots: torch.Tensor  # [R, C] int64 (a real slot also where padded: never an unwritten one)
    mask: torch.Tensor  # [R, 1, Q, C] bool


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Metadata of one packed forward pass; the same for every layer."""

    write_slots: torch.Tensor  # [T] int64, where each packed token's K/V goes
    groups: tuple[RowGroup, ...]


class KVCache:
    """K/V pages of all layers as flat slots. Knows nothing of requests: slots are handed out elsewhere."""

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_slots, num_kv_heads, head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key, value [T, G, D] at slots [T]."""
        self.keys[layer].index_copy_(0, slots, key)
        self.values[layer].index_copy_(0, slots, value)


def slots_of(page_table: np.ndarray, rows: np.ndarray, indices: np.ndarray, page_size: int) -> np.ndarray:
    """Slots of the tokens `indices` (cache index) of `rows`; all arrays of one broadcastable shape, int64."""
    return page_table[rows, indices // page_size] * page_size + indices % page_size


def build_attention_batch(
    page_table: np.ndarray,  # [R, P]
    page_size: int,
    start: np.ndarray,  # [R] cache index of each row's first query token
    query_lens: np.ndarray,  # [R] >= 1
    *,
    causal: bool,
    device: torch.device,
    sizes: tuple[int, ...] = (QUERIES,),
) -> AttentionBatch:
    """Plan attention of rows whose query tokens sit at cache indices start .. start + query_len - 1.

    Each query sees its row's cache indices up to its own (causal) or up to the row's last query (not causal: the draft
    block of equation 3, whose positions see each other and all context). Args: sizes: of pieces, rising.
    """
    offsets = np.concatenate([[0], np.cumsum(query_lens)])
    rows = np.repeat(np.arange(len(query_lens)), query_lens)
    within = np.arange(offsets[-1]) - offsets[rows]
    write_slots = slots_of(page_table, rows, start[rows] + within, page_size)
    pieces = _cut(start, query_lens, offsets[:-1], causal, np.array(sizes))
    groups = [_row_group(page_table, page_size, pieces, members, device) for members in _buckets(pieces)]
    return AttentionBatch(_to(write_slots, device), tuple(groups))


@dataclass(frozen=True, slots=True)
class Pieces:
    """Runs of at most `sizes` query tokens of one row, in packed order. S pieces."""

    rows: np.ndarray  # [S] int64, row of the page table
    sizes: np.ndarray  # [S] int64, query tokens with padding
    lens: np.ndarray  # [S] int64, query tokens
    packed: np.ndarray  # [S] int64, packed index of the first query
    first_seen: np.ndarray  # [S] int64, cache indices that the first query sees
    kv_lens: np.ndarray  # [S] int64, cache indices that the last query sees
    causal: bool


def _cut(start: np.ndarray, query_lens: np.ndarray, packed: np.ndarray, causal: bool, sizes: np.ndarray) -> Pieces:
    row_sizes = sizes[np.minimum(np.searchsorted(sizes, query_lens), len(sizes) - 1)]
    counts = -(-query_lens // row_sizes)
    rows = np.repeat(np.arange(len(query_lens)), counts)
    done = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * row_sizes[rows]
    lens = np.minimum(query_lens[rows] - done, row_sizes[rows])
    kv_lens = start[rows] + (done + lens if causal else query_lens[rows])
    return Pieces(rows, row_sizes[rows], lens, packed[rows] + done, start[rows] + done + 1, kv_lens, causal)


def _buckets(pieces: Pieces) -> list[np.ndarray]:
    """Indices of pieces of one size whose contexts are of similar length: padding costs at most BUCKET_FACTOR."""
    multiples = np.maximum(pieces.kv_lens, CONTEXT_MULTIPLE) / CONTEXT_MULTIPLE
    bucket = np.floor(np.log(multiples) / np.log(BUCKET_FACTOR)).astype(np.int64)
    keys = np.stack([pieces.sizes, bucket], axis=1)
    return [np.flatnonzero((keys == key).all(1)) for key in np.unique(keys, axis=0)]


def _row_group(
    page_table: np.ndarray, page_size: int, pieces: Pieces, members: np.ndarray, device: torch.device
) -> RowGroup:
    rows, lens, kv_lens = pieces.rows[members], pieces.lens[members], pieces.kv_lens[members]
    places = np.arange(pieces.sizes[members[0]])[None, :]
    query = np.minimum(places, lens[:, None] - 1)  # [R, Q], padding repeats the last query
    context = np.arange(-(-kv_lens.max() // CONTEXT_MULTIPLE) * CONTEXT_MULTIPLE)
    kv_index = np.minimum(context[None, :], kv_lens[:, None] - 1)  # padding repeats a written slot and is masked
    seen = pieces.first_seen[members][:, None] + query if pieces.causal else kv_lens[:, None] + 0 * query
    query_index = pieces.packed[members][:, None] + query
    query_flat = np.flatnonzero(places < lens[:, None])
    return RowGroup(
        _to(query_index, device),
        _to(query_flat, device),
        _to(query_index.reshape(-1)[query_flat], device),
        _to(slots_of(page_table, rows[:, None], kv_index, page_size), device),
        _to((context[None, None, :] < seen[:, :, None])[:, None], device),
    )


def _to(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


def paged_attention(
    query: torch.Tensor,  # [T, H, D]
    cache: KVCache,
    layer: int,
    batch: AttentionBatch,
    scaling: float,
) -> torch.Tensor:  # [T, H, D]
    """Attend each packed query to its row's slots; the step's own K/V must have been written before.

    The query heads that share a key/value head attend as if they were further queries, so that no key is read twice.
    """
    out = torch.empty_like(query)
    keys, values = cache.keys[layer], cache.values[layer]
    shared = query.shape[1] // keys.shape[1]
    for group in batch.groups:
        rows, num_queries = group.query_index.shape
        q = query.index_select(0, group.query_index.reshape(-1)).view(rows, num_queries, -1, shared, query.shape[2])
        q = q.permute(0, 2, 1, 3, 4).reshape(rows, -1, num_queries * shared, query.shape[2])  # [R, G, Q * shared, D]
        mask = group.mask if shared == 1 else group.mask.repeat_interleave(shared, dim=2)
        attended = scaled_dot_product_attention(
            q, _gather(keys, group.kv_slots), _gather(values, group.kv_slots), attn_mask=mask, scale=scaling
        )
        attended = attended.view(rows, -1, num_queries, shared, query.shape[2]).permute(0, 2, 1, 3, 4)
        flat = attended.reshape(rows * num_queries, *query.shape[1:])
        out.index_copy_(0, group.packed, flat.index_select(0, group.query_flat))
    return out


def _gather(pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:  # [R, G, C, D]
    rows, context = slots.shape
    return pages.index_select(0, slots.reshape(-1)).view(rows, context, *pages.shape[1:]).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """What the registered attention function finds while a packed forward pass runs."""

    cache: KVCache
    batch: AttentionBatch


_active: ContextVar[AttentionContext] = ContextVar("dspark_attention_context")


@contextmanager
def attention_context(cache: KVCache, batch: AttentionBatch) -> Iterator[None]:
    """The one place where ambient attention metadata is set; wraps one forward pass."""
    token = _active.set(AttentionContext(cache, batch))
    try:
        yield
    finally:
        _active.reset(token)


def active_context() -> AttentionContext:
    return _active.get()
