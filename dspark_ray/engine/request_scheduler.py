"""Who runs next: continuous batching with chunked prefill beside verification in one packed step, page by page.

Not to be confused with the PrefixScheduler (Algorithm 1), which picks verification lengths. Knows nothing of tensors.
"""

from collections import deque
from dataclasses import dataclass

from dspark_ray.config import EngineConfig
from dspark_ray.engine.kv_cache import PageAllocator
from dspark_ray.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """One sequence's share of a step: how many of its uncomputed tokens, and room for how many drafts behind them."""

    sequence: Sequence
    num_tokens: int
    max_drafts: int

    @property
    def samples(self) -> bool:
        return self.num_tokens == self.sequence.num_uncomputed


class RequestScheduler:
    """Waiting and running sequences, first come first served. A sequence that finds no page preempts the newest one,
    which is recomputed later from its prompt and what it has emitted."""

    def __init__(
        self, config: EngineConfig, allocator: PageAllocator, num_draft_tokens: int, max_model_len: int
    ) -> None:
        self._config = config
        self._allocator = allocator
        self._num_draft_tokens = num_draft_tokens
        self._max_model_len = max_model_len
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    @property
    def num_pending(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a finished or aborted sequence and free its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._allocator.free(sequence.pages)

    def preempt_all(self) -> None:
        """After the group was lost: every page is void, everything running is computed again, oldest first."""
        for sequence in list(reversed(self.running)):
            self._preempt(sequence)

    def schedule(self) -> list[ScheduledRow]:
        """Rows of the next step, every one with its pages. Decoding rows first, then prefill within the token limit.

        Prefilling sequences may hold all pages between them and none go on: then the newest gives way.
        """
        rows = self._schedule_once()
        while not rows and len(self.running) > 1:
            self._preempt(self.running[-1])
            rows = self._schedule_once()
        return rows

    def _schedule_once(self) -> list[ScheduledRow]:
        rows = self._schedule_decoding()
        budget = self._config.max_prefill_tokens
        for sequence in [s for s in self.running if not s.decoding]:
            budget -= self._schedule_prefill(sequence, budget, rows)
        while self.waiting and budget > 0 and self._may_start(self.waiting[0]):
            taken = self._schedule_prefill(self.waiting[0], budget, rows)
            if taken == 0:
                break
            self.running.append(self.waiting.popleft())
            budget -= taken
        return rows

    def _may_start(self, sequence: Sequence) -> bool:
        """A sequence starts when it fits whole with a step's drafts, so that it is not preempted at once again."""
        if len(self.running) >= self._config.max_num_seqs:
            return False
        pages = self._allocator.pages_for(len(sequence.tokens) + self._num_draft_tokens + 1)
        return not self.running or pages <= self._allocator.num_free

    def _schedule_decoding(self) -> list[ScheduledRow]:
        rows = []
        for sequence in list(self.running):
            if not sequence.decoding or sequence not in self.running:
                continue
            drafts = self._room_for_drafts(sequence)
            if self._make_room(sequence, len(sequence.tokens) + drafts):
                rows.append(ScheduledRow(sequence, 1, drafts))
        return [row for row in rows if row.sequence in self.running]

    def _room_for_drafts(self, sequence: Sequence) -> int:
        request = sequence.request
        if not request.speculation:
            return 0
        wanted = self._num_draft_tokens if request.num_draft_tokens is None else request.num_draft_tokens
        useful = sequence.output.num_remaining - 1  # the bonus token takes the last place
        fits = self._max_model_len - len(sequence.tokens)
        return max(0, min(wanted, self._num_draft_tokens, useful, fits))

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give `sequence` pages for num_tokens, preempting newer sequences if need be; False if it was preempted."""
        while not self._allocator.grow(sequence.pages, num_tokens):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._allocator.free(sequence.pages)
        sequence.reset()
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _schedule_prefill(self, sequence: Sequence, budget: int, rows: list[ScheduledRow]) -> int:
        """Append a chunk of the sequence to rows; returns its tokens, 0 if the budget or the pages do not allow one."""
        num_tokens = min(sequence.num_uncomputed, budget)
        if num_tokens <= 0 or not self._allocator.grow(sequence.pages, sequence.num_computed + num_tokens):
            return 0
        rows.append(ScheduledRow(sequence, num_tokens, 0))
        return num_tokens
