"""Who runs next: chunked prefill beside decoding, preemption, page limits."""

import asyncio

from dspark_ray.config import EngineConfig
from dspark_ray.engine.kv_cache import PageAllocator
from dspark_ray.engine.output import OutputProcessor
from dspark_ray.engine.request_scheduler import RequestScheduler, ScheduledRow
from dspark_ray.engine.sequence import Sequence
from dspark_ray.request import GenerationRequest, SamplingParams

K = 3


def sequence(name: str, prompt: int, **fields: object) -> Sequence:
    sampling = SamplingParams(max_tokens=50)
    request = GenerationRequest(name, tuple(range(prompt)), sampling, **fields)  # type: ignore[arg-type]
    output = OutputProcessor(sampling, frozenset(), None)
    return Sequence(request, output, list(request.prompt_token_ids), 0, asyncio.Queue())


def scheduler(num_pages: int = 100, **engine: int) -> RequestScheduler:
    config = EngineConfig(page_size=4, **engine)
    return RequestScheduler(config, PageAllocator(num_pages, 4), K, max_model_len=64)


def finish_step(rows: list[ScheduledRow], num_new: int = 1) -> None:
    for row in rows:
        new = [7] * num_new if row.samples else []
        row.sequence.advance(row.num_tokens + max(0, len(new) - 1), new)


def names(rows: list[ScheduledRow]) -> list[tuple[str, int, bool]]:
    return [(row.sequence.request_id, row.num_tokens, row.samples) for row in rows]


def test_a_long_prompt_is_prefilled_in_chunks_beside_decoding() -> None:
    plan = scheduler(max_prefill_tokens=8)
    plan.add(sequence("a", 5))
    finish_step(plan.schedule())
    plan.add(sequence("b", 20))
    first = plan.schedule()
    assert names(first) == [("a", 1, True), ("b", 8, False)]
    finish_step(first)
    second = plan.schedule()
    assert names(second) == [("a", 1, True), ("b", 8, False)]
    finish_step(second)
    assert names(plan.schedule()) == [("a", 1, True), ("b", 4, True)]


def test_rows_that_prefill_carry_no_drafts_and_decoding_rows_do() -> None:
    plan = scheduler()
    plan.add(sequence("a", 5))
    assert [row.max_drafts for row in plan.schedule()] == [0]
    finish_step(plan.schedule())
    assert [row.max_drafts for row in plan.schedule()] == [K]


def test_drafts_never_reach_past_max_tokens_or_the_context() -> None:
    plan = scheduler()
    near_end = sequence("a", 5)
    near_end.output.num_tokens = 48
    plan.add(near_end)
    finish_step(plan.schedule())
    assert [row.max_drafts for row in plan.schedule()] == [1]  # two tokens are due, the bonus is one of them
    full = sequence("b", 62)
    plan.add(full)
    finish_step(plan.schedule())
    assert [row.max_drafts for row in plan.schedule() if row.sequence is full] == [1]


def test_a_request_without_speculation_gets_no_drafts() -> None:
    plan = scheduler()
    plan.add(sequence("a", 5, speculation=False))
    plan.add(sequence("b", 5, num_draft_tokens=2))
    finish_step(plan.schedule())
    assert [row.max_drafts for row in plan.schedule()] == [0, 2]


def test_the_newest_sequence_gives_way_when_pages_run_out() -> None:
    plan = scheduler(num_pages=5)
    plan.add(sequence("old", 7))
    plan.add(sequence("new", 7))
    finish_step(plan.schedule())  # 2 pages each; decoding with drafts wants 3 each
    rows = plan.schedule()
    assert names(rows) == [("old", 1, True)]
    assert [s.request_id for s in plan.waiting] == ["new"]
    assert plan.waiting[0].num_computed == 0
    assert plan.num_preemptions == 1
    assert names(plan.schedule()) == [("old", 1, True)]  # and waits until it fits whole


def test_prefills_that_hold_all_pages_between_them_do_not_stall() -> None:
    plan = scheduler(num_pages=12, max_prefill_tokens=12)
    plan.add(sequence("a", 20))
    plan.add(sequence("b", 20))
    for _ in range(4):
        rows = plan.schedule()
        assert rows
        finish_step(rows)
    assert plan.running[0].request_id == "a"
    assert plan.running[0].decoding


def test_max_num_seqs_bounds_the_batch() -> None:
    plan = scheduler(max_num_seqs=2)
    for name in "abc":
        plan.add(sequence(name, 3))
    assert len(plan.schedule()) == 2


def test_after_a_lost_group_everything_starts_over_oldest_first() -> None:
    plan = scheduler()
    for name in "ab":
        plan.add(sequence(name, 3))
    finish_step(plan.schedule())
    plan.preempt_all()
    assert [s.request_id for s in plan.waiting] == ["a", "b"]
    assert names(plan.schedule()) == [("a", 4, True), ("b", 4, True)]
