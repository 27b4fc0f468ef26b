"""Measures the cost table at start-up: step time by batch tokens on this hardware, and the time of a draft.

Runs synthetic steps through the same runner and drafter that serve; pages are not in use yet. Steps cover the sizes
that decoding reaches: rows of one anchor with a full draft each.
"""

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from dspark_ray.algorithm.columns import SamplingColumns
from dspark_ray.algorithm.cost_table import CostTable
from dspark_ray.engine.batch import DraftPlan, FeatureBatch, StepPlan, TargetInfo, empty_feature_batch
from dspark_ray.engine.drafters.base import Drafter

PROFILE_CONTEXT = 128  # tokens of context behind every profiled row
REPEATS = 5
MAX_PROFILED_TOKENS = 256


def profiled_batch_tokens(max_num_seqs: int, num_draft_tokens: int) -> list[int]:
    """1, 2, 4, ... up to a full decoding batch or MAX_PROFILED_TOKENS."""
    most = min(max_num_seqs * (num_draft_tokens + 1), MAX_PROFILED_TOKENS)
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(sizes[-1] * 2, most))
    return sizes


def greedy_columns(num_rows: int) -> SamplingColumns:
    return SamplingColumns(
        temperature=np.zeros(num_rows, dtype=np.float32),
        top_k=np.zeros(num_rows, dtype=np.int64),
        top_p=np.ones(num_rows, dtype=np.float32),
        min_p=np.zeros(num_rows, dtype=np.float32),
        noise_seeds=np.arange(num_rows, dtype=np.int64),
        coupled=np.zeros(num_rows, dtype=bool),
    )


def synthetic_plan(info: TargetInfo, batch_tokens: int) -> tuple[StepPlan, np.ndarray]:
    """Rows that together have `batch_tokens` tokens behind PROFILE_CONTEXT tokens of context, and their verify_lens.

    All rows share the same pages: what is in them does not matter to time.
    """
    width = info.num_draft_tokens + 1
    rows = -(-batch_tokens // width)
    lens = np.full(rows, width - 1, dtype=np.int64)
    lens[-1] -= rows * width - batch_tokens
    context = min(PROFILE_CONTEXT, info.num_pages * info.page_size - width, info.max_model_len - width)
    pages = np.arange(-(-(context + width) // info.page_size), dtype=np.int64)
    plan = StepPlan(
        step=0,
        request_ids=tuple(f"profile-{row}" for row in range(rows)),
        token_ids=np.zeros(rows, dtype=np.int64),
        query_lens=np.ones(rows, dtype=np.int64),
        start_positions=np.full(rows, max(0, context), dtype=np.int64),
        samples=np.ones(rows, dtype=bool),
        max_drafts=lens,
        page_table=np.tile(pages, (rows, 1)),
        sampling=greedy_columns(rows),
        wants_draft=np.zeros(rows, dtype=bool),
        routes=np.zeros(rows, dtype=np.int64),
    )
    return plan, lens


def median_seconds(run: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median wall time of `run` after one warm-up call."""
    run()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def profile_target(
    run: Callable[[StepPlan, np.ndarray], object], info: TargetInfo, max_num_seqs: int, repeats: int = REPEATS
) -> CostTable:
    """Step time by batch tokens; `run(plan, verify_lens)` executes one synthetic step."""
    sizes = profiled_batch_tokens(max_num_seqs, info.num_draft_tokens)
    seconds = []
    for size in sizes:
        plan, lens = synthetic_plan(info, size)
        seconds.append(median_seconds(lambda plan=plan, lens=lens: run(plan, lens), repeats))  # type: ignore[misc]
    return CostTable.from_measurements(sizes, seconds, draft_seconds=0.0, provenance=info.provenance)


def profile_drafter(drafter: Drafter, hidden_size: int, dtype: torch.dtype, repeats: int = REPEATS) -> float:
    """Seconds of one draft block for one request behind PROFILE_CONTEXT tokens of context."""

    def features(start: int, count: int) -> FeatureBatch:
        return FeatureBatch(
            step=0,
            request_ids=("profile",),
            start_positions=np.array([start]),
            counts=np.array([count]),
            token_ids=np.zeros(count, dtype=np.int64),
            features=torch.zeros(count, hidden_size, dtype=dtype) if hidden_size else None,
            anchors=np.zeros(1, dtype=np.int64),
            drafts=np.ones(1, dtype=bool),
            num_admitted=np.zeros(1, dtype=np.int64),
            num_accepted=np.zeros(1, dtype=np.int64),
            sampling=greedy_columns(1),
        )

    drafter.propose(DraftPlan(0), features(0, PROFILE_CONTEXT))
    position = iter(range(PROFILE_CONTEXT, PROFILE_CONTEXT + repeats + 1))
    seconds = median_seconds(lambda: drafter.propose(DraftPlan(0), features(next(position), 1)), repeats)
    drafter.propose(DraftPlan(0, dropped=("profile",)), empty_feature_batch())
    return seconds
