"""Which pages hold each request's draft context, keyed by request id; forgets the longest unused. Knows no tensors.

A token's cache index counts what is cached and need not equal its position: a context that lost its beginning goes on
from what it has. Letters: R requests, N packed tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dspark_ray.engine.kv_cache import PageAllocator
from dspark_ray.models.attention import slots_of

IDLE_CALLS = 4  # a context unused for so many calls belongs to no cohort in flight and may be evicted


@dataclass(slots=True)
class Context:
    """`length` tokens are cached; the next one to come has position `next_position` unless some are lost on the way."""

    pages: list[int] = field(default_factory=list)
    length: int = 0
    next_position: int = 0
    last_used: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the new tokens of a step go. Tokens of requests without room are left out."""

    contexts: dict[int, Context]  # by row, without the rows that found no room
    kept: np.ndarray  # [N'] int64, packed indices of the tokens that have a slot
    slots: np.ndarray  # [N'] int64


class ContextPool:
    """A fixed number of pages for all requests. Never fails: who finds no room has no context."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._allocator = PageAllocator(num_pages, page_size)
        self._contexts: dict[str, Context] = {}
        self._calls = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._contexts

    @property
    def page_size(self) -> int:
        return self._allocator.page_size

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests; unknown ones are ignored."""
        for request_id in request_ids:
            if (context := self._contexts.pop(request_id, None)) is not None:
                self._allocator.free(context.pages)

    def place(
        self,
        request_ids: Sequence[str],
        start_positions: np.ndarray,  # [R] int64
        counts: np.ndarray,  # [R] int64, new tokens
        scratch: int,
        max_positions: int,
    ) -> Placement:
        """Make room for each request's new tokens and `scratch` more behind them.

        A start before what the context has seen (recompute after preemption) restarts it; a start after it is a gap and
        is appended as it is. A context whose next position would be `max_positions` or more is forgotten.
        """
        self._calls += 1
        for request_id in request_ids:
            if (context := self._contexts.get(request_id)) is not None:
                context.last_used = self._calls
        ends = start_positions + counts
        contexts: dict[int, Context] = {}
        for row, request_id in enumerate(request_ids):
            in_range = ends[row] < max_positions
            if in_range and self._extend(request_id, int(start_positions[row]), int(counts[row]), scratch):
                contexts[row] = self._contexts[request_id]
            else:
                self.drop((request_id,))
        return Placement(contexts, *self._new_slots(contexts, counts))

    def page_table(self, contexts: Sequence[Context]) -> np.ndarray:  # [R, P]
        table = np.zeros((len(contexts), max((len(context.pages) for context in contexts), default=0)), dtype=np.int64)
        for row, context in enumerate(contexts):
            table[row, : len(context.pages)] = context.pages
        return table

    def _extend(self, request_id: str, start: int, count: int, scratch: int) -> bool:
        context = self._contexts.setdefault(request_id, Context(last_used=self._calls))
        if start < context.next_position:
            self._allocator.free(context.pages)
            context.length = 0
        if not self._grow(context, context.length + count + scratch):
            return False
        context.length += count
        context.next_position = start + count
        return True

    def _grow(self, context: Context, num_tokens: int) -> bool:
        if self._allocator.pages_for(num_tokens) > self._allocator.num_pages:
            return False
        while not self._allocator.grow(context.pages, num_tokens):
            oldest = min(self._contexts, key=lambda request_id: self._contexts[request_id].last_used)
            if self._calls - self._contexts[oldest].last_used < IDLE_CALLS:
                return False
            self.drop((oldest,))
        return True

    def _new_slots(self, contexts: dict[int, Context], counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Packed indices and slots of the last counts[row] tokens of each context."""
        rows = np.array(list(contexts), dtype=np.int64)
        members = np.repeat(np.arange(len(rows)), counts[rows])  # which context each kept token belongs to
        lengths = np.array([context.length for context in contexts.values()], dtype=np.int64)
        indices = packed_positions(lengths - counts[rows], counts[rows])
        kept = packed_positions((np.cumsum(counts) - counts)[rows], counts[rows])
        return kept, slots_of(self.page_table(list(contexts.values())), members, indices, self.page_size)


def packed_positions(start_positions: np.ndarray, counts: np.ndarray) -> np.ndarray:  # [R], [R] -> [N]
    """Consecutive numbers of packed tokens: counts[r] of them from start_positions[r] on."""
    first = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) + np.repeat(start_positions - first, counts)
