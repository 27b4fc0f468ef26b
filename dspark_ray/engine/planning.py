"""Turns scheduled rows into the columns of a StepPlan. Pure; no state."""

import numpy as np

from dspark_ray.algorithm.columns import SamplingColumns
from dspark_ray.engine.batch import StepPlan
from dspark_ray.engine.request_scheduler import ScheduledRow
from dspark_ray.engine.sequence import Sequence


def build_plan(step: int, rows: list[ScheduledRow], draft_budget: int | None, *, speculate: bool) -> StepPlan:
    """The plan of one step; drafts are wanted for requests that speculate and are not about to end."""
    sequences = [row.sequence for row in rows]
    return StepPlan(
        step=step,
        request_ids=tuple(sequence.request_id for sequence in sequences),
        token_ids=np.concatenate([_tokens(row) for row in rows]),
        query_lens=np.array([row.num_tokens for row in rows], dtype=np.int64),
        start_positions=np.array([sequence.num_computed for sequence in sequences], dtype=np.int64),
        samples=np.array([row.samples for row in rows], dtype=bool),
        max_drafts=np.array([row.max_drafts for row in rows], dtype=np.int64),
        page_table=_page_table(sequences),
        sampling=sampling_columns(sequences),
        wants_draft=np.array([speculate and wants_draft(row) for row in rows], dtype=bool),
        draft_budget=draft_budget,
    )


def wants_draft(row: ScheduledRow) -> bool:
    """Whether the drafter should hear of this row: its request speculates, and a token after this step is due."""
    sequence = row.sequence
    limit = sequence.request.num_draft_tokens
    return sequence.request.speculation and limit != 0 and sequence.output.num_remaining > 1


def _tokens(row: ScheduledRow) -> np.ndarray:
    start = row.sequence.num_computed
    return np.array(row.sequence.tokens[start : start + row.num_tokens], dtype=np.int64)


def _page_table(sequences: list[Sequence]) -> np.ndarray:  # [R, P]
    width = max(len(sequence.pages) for sequence in sequences)
    table = np.zeros((len(sequences), width), dtype=np.int64)
    for row, sequence in enumerate(sequences):
        table[row, : len(sequence.pages)] = sequence.pages
    return table


def sampling_columns(sequences: list[Sequence]) -> SamplingColumns:
    params = [sequence.request.sampling for sequence in sequences]
    return SamplingColumns(
        temperature=np.array([p.temperature for p in params], dtype=np.float32),
        top_k=np.array([max(p.top_k, 0) for p in params], dtype=np.int64),
        top_p=np.array([p.top_p for p in params], dtype=np.float32),
        min_p=np.array([p.min_p for p in params], dtype=np.float32),
        noise_seeds=np.array([sequence.noise_seed for sequence in sequences], dtype=np.int64),
        coupled=np.array([p.coupled for p in params], dtype=bool),
    )
