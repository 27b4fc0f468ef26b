"""The serving loop: requests in, chunks out, one step after another over an executor.

Owns sequences and pages; knows neither tensors nor Ray. Handlers only enqueue and read their queue: no client's
disconnect can cancel a step that others share.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import numpy as np

from dspark_ray.algorithm.cost_table import CostTable
from dspark_ray.config import AppConfig
from dspark_ray.engine.batch import StepPlan, StepResult, TargetInfo
from dspark_ray.engine.cost_table_cache import cached_path, obtain_cost_table, save_cost_table
from dspark_ray.engine.draft_budget import BudgetSource, DraftBudget, LoadReport, build_prefix_scheduler
from dspark_ray.engine.executor import Executor
from dspark_ray.engine.kv_cache import PageAllocator
from dspark_ray.engine.output import OutputProcessor, TextDecoder, read_eos_token_ids
from dspark_ray.engine.planning import build_plan
from dspark_ray.engine.request_scheduler import RequestScheduler, ScheduledRow
from dspark_ray.engine.sequence import Sequence, TokenHistories, noise_seed_of
from dspark_ray.engine.stats import EngineStats
from dspark_ray.errors import DSparkError, EngineDeadError, ExecutorError, QueueFullError, RequestError
from dspark_ray.request import GenerationChunk, GenerationRequest, SpeculationCounts

logger = logging.getLogger(__name__)

MAX_REBUILDS_IN_A_ROW = 3
COST_EMA = 0.02  # weight of one real step in the cost table


class Engine:
    """One target group's engine. `start`, then `generate` from any number of tasks, then `close`."""

    def __init__(
        self,
        config: AppConfig,
        executor: Executor,
        model_folder: str,
        budget_source: BudgetSource | None = None,
    ) -> None:
        self._config = config
        self._executor = executor
        self._budget_source = budget_source
        self._decoder = TextDecoder.load(model_folder)
        self._eos = read_eos_token_ids(model_folder)
        self._sequences: dict[str, Sequence] = {}
        self._finished: list[str] = []  # whose drafter state can go, told with the next step
        self._work = asyncio.Event()
        self._dead: str | None = None
        self._last_progress = time.monotonic()
        self._step = 0
        self._loop_task: asyncio.Task[None] | None = None
        self._cost_table_path: Path | None = None

    async def start(
        self, cost_table: CostTable | None = None, *, drafters_ready: Awaitable[object] | None = None
    ) -> TargetInfo:
        """Start the executor, find or profile the cost table unless one is given, then begin to serve.

        `drafters_ready` is awaited in between, so that the time of a draft is part of the profile.
        """
        self.info = await self._executor.start()
        if drafters_ready is not None:
            await drafters_ready
        verification = self._config.verification
        needed = self.info.num_draft_tokens > 0 and verification.policy in ("adaptive", "algorithm1")
        if needed and cost_table is None:
            self._cost_table_path = cached_path(self._config, self.info, self._executor.describe()["executor"])
            cost_table = await obtain_cost_table(self._config, self._cost_table_path, self._executor.profile)
        self.cost_table = cost_table
        await self._executor.set_cost_table(cost_table)
        speculates = verification.policy != "none" and self.info.num_draft_tokens > 0
        self._num_draft_tokens = self.info.num_draft_tokens if speculates else 0
        scheduler = build_prefix_scheduler(verification, self._num_draft_tokens, cost_table)
        self.budget = DraftBudget(scheduler, verification.budget_lag, self._num_draft_tokens, self._budget_source)
        self._allocator = PageAllocator(self.info.num_pages, self.info.page_size)
        self.scheduler = RequestScheduler(
            self._config.engine, self._allocator, self._num_draft_tokens, self.info.max_model_len
        )
        self.totals = EngineStats(self.info.num_draft_tokens)
        self._loop_task = asyncio.create_task(self._run(), name="dspark-engine")
        return self.info

    async def close(self) -> None:
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
            if self._cost_table_path and self.cost_table and self._config.verification.cache_cost_table:
                save_cost_table(self.cost_table, self._cost_table_path)
        self._fail_all(EngineDeadError("the engine was closed"))
        await self._executor.close()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        """Stream one request's chunks; at most one a step. Leaving the iterator early aborts the request.

        Raises RequestError (bad request), QueueFullError (too many pending), EngineDeadError (group lost for good).
        """
        sequence = self._admit(request)
        try:
            while True:
                item = await sequence.chunks.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            self.abort(request.request_id)

    def abort(self, request_id: str) -> None:
        """Forget a request at once; its pages are free again before the next step. Unknown ids are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self.totals.aborted += 1
            self._release(sequence)

    def _admit(self, request: GenerationRequest) -> Sequence:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        if request.request_id in self._sequences:
            raise RequestError(f"request id {request.request_id!r} is in use already", param="request_id")
        self._validate(request)
        if self.scheduler.num_pending >= self._config.engine.max_queued:
            raise QueueFullError(
                f"{self.scheduler.num_pending} requests are pending (limit {self._config.engine.max_queued})"
            )
        output = OutputProcessor(request.sampling, self._eos, self._decoder)
        output.replay(request.resumed_token_ids)
        sequence = Sequence(
            request=request,
            output=output,
            tokens=[*request.prompt_token_ids, *request.resumed_token_ids],
            noise_seed=noise_seed_of(request),
            chunks=asyncio.Queue(),
        )
        self._sequences[request.request_id] = sequence
        self.scheduler.add(sequence)
        self.totals.requests += 1
        self.totals.prompt_tokens += sequence.num_prompt_tokens
        self._work.set()
        return sequence

    def _validate(self, request: GenerationRequest) -> None:
        prompt, limit = request.prompt_token_ids, self.info.max_model_len
        if not prompt:
            raise RequestError("the prompt is empty: expected at least one token", param="prompt")
        if len(prompt) >= limit:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, but at most {limit - 1} fit (context {limit}, one to generate)",
                param="prompt",
                code="context_length_exceeded",
            )
        for param, ids in (("prompt", prompt), ("stop_token_ids", request.sampling.stop_token_ids)):
            bad = [token for token in ids if not 0 <= token < self.info.vocab_size]
            if bad:
                raise RequestError(
                    f"{param} holds token id {bad[0]}, expected 0..{self.info.vocab_size - 1}", param=param
                )
        if len(prompt) + request.sampling.max_tokens > limit:
            raise RequestError(
                f"prompt ({len(prompt)} tokens) plus max_tokens ({request.sampling.max_tokens}) exceed the context of "
                f"{limit} tokens; lower max_tokens to at most {limit - len(prompt)}",
                param="max_tokens",
                code="context_length_exceeded",
            )

    async def _run(self) -> None:
        failures = 0
        while self._dead is None:
            if not self.scheduler.num_pending:
                self._work.clear()
                self._last_progress = time.monotonic()
                await self._work.wait()
            try:
                await self._one_step()
                failures = 0
            except ExecutorError as error:
                failures += 1
                await self._rebuild(error, failures)
            except Exception as error:
                logger.exception("the engine loop failed")
                self._die(f"the engine failed: {error!r}")

    async def _one_step(self) -> None:
        rows = self.scheduler.schedule()
        if not rows:
            await asyncio.sleep(0.001)
            return
        self._step += 1
        plan = self._plan(rows)
        finished, self._finished = tuple(self._finished), []
        try:
            result = await self._executor.step(
                plan, finished, TokenHistories({r.sequence.request_id: r.sequence for r in rows})
            )
        except ExecutorError:
            self._finished.extend(finished)
            raise
        self._last_progress = time.monotonic()
        self._apply(rows, plan, result)

    def _plan(self, rows: list[ScheduledRow]) -> StepPlan:
        sampling = [row for row in rows if row.samples]
        budget = self.budget.decide(
            tuple(row.sequence.request_id for row in sampling),
            np.array([row.max_drafts for row in sampling], dtype=np.int64),
            sum(row.num_tokens for row in rows) - len(sampling),
            self.cost_table,
        )
        return build_plan(self._step, rows, budget, speculate=self._num_draft_tokens > 0)

    def _apply(self, rows: list[ScheduledRow], plan: StepPlan, result: StepResult) -> None:
        """Hand each row its new tokens. Sequences aborted during the step are gone already."""
        decoding = np.array([row.sequence.decoding for row in rows])
        self.totals.record(result, decoding)
        emitted = 0
        for index, row in enumerate(rows):
            if row.sequence.finished or row.sequence not in self.scheduler.running:
                continue
            if result.failed[index]:
                self._fail(row.sequence, DSparkError("the model returned logits that are not finite for this request"))
                continue
            emitted += self._advance(row, index, result)
        self.totals.emitted += emitted
        self._observe(rows, plan, result, emitted)

    def _advance(self, row: ScheduledRow, index: int, result: StepResult) -> int:
        """Record one row's step; returns the tokens emitted after the stop rules."""
        sequence, count = row.sequence, int(result.num_new[index])
        new_tokens = result.tokens[index, :count].tolist()
        sequence.advance(row.num_tokens + max(0, count - 1), new_tokens)
        if not new_tokens:
            return 0
        delta = sequence.output.push(new_tokens)
        counts = SpeculationCounts(
            int(result.num_drafted[index]),
            int(result.num_admitted[index]),
            int(result.num_accepted[index]),
            len(delta.token_ids),
        )
        sequence.chunks.put_nowait(
            GenerationChunk(
                sequence.request_id,
                delta.text,
                delta.token_ids,
                counts,
                delta.finish_reason,
                sequence.num_prompt_tokens,
            )
        )
        if delta.finish_reason is not None:
            self.totals.finished += 1
            self._release(sequence)
        return len(delta.token_ids)

    def _observe(self, rows: list[ScheduledRow], plan: StepPlan, result: StepResult, emitted: int) -> None:
        if self.cost_table is not None and not (plan.query_lens > 1).any():
            self.cost_table = self.cost_table.refined(result.batch_tokens, result.step_seconds, COST_EMA)
        drafted = np.flatnonzero(result.num_drafted)
        report = LoadReport(
            step=plan.step,
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            base_tokens=len(plan.token_ids),
            batch_tokens=result.batch_tokens,
            num_sampling=int((plan.samples & plan.wants_draft).sum()),
            survival=result.survival[drafted],
            max_drafts=plan.max_drafts[drafted],
            step_seconds=result.step_seconds,
            draft_seconds=result.draft_seconds,
            drafted=int(result.num_drafted.sum()),
            admitted=int(result.num_admitted.sum()),
            accepted=int(result.num_accepted.sum()),
            emitted=emitted,
        )
        rows_seen = {plan.request_ids[index]: result.survival[index] for index in drafted}
        self.budget.observe(rows_seen, tuple(self._finished), report)

    def _release(self, sequence: Sequence) -> None:
        sequence.finished = True
        self._sequences.pop(sequence.request_id, None)
        self.scheduler.remove(sequence)
        self._finished.append(sequence.request_id)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        self._release(sequence)
        sequence.chunks.put_nowait(error)

    def _fail_all(self, error: Exception) -> None:
        for sequence in list(self._sequences.values()):
            self._fail(sequence, error)

    async def _rebuild(self, error: ExecutorError, failures: int) -> None:
        """The group is gone: build a new one and compute every running sequence again from what it has emitted."""
        logger.error("target group lost (%s); rebuilding, attempt %d of %d", error, failures, MAX_REBUILDS_IN_A_ROW)
        if failures > MAX_REBUILDS_IN_A_ROW:
            self._die(f"the target group was lost and could not be rebuilt: {error}")
            return
        self.scheduler.preempt_all()
        try:
            await self._executor.restart()
            await self._executor.set_cost_table(self.cost_table)
        except Exception as failure:
            self._die(f"the target group was lost and could not be rebuilt: {failure!r}")
            return
        self.totals.rebuilds += 1
        self._last_progress = time.monotonic()

    def _die(self, reason: str) -> None:
        self._dead = reason
        self._fail_all(EngineDeadError(reason))

    def check_health(self) -> None:
        """Raise EngineDeadError if the engine is dead, or frozen: work pending and no step for watchdog_seconds."""
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        idle = time.monotonic() - self._last_progress
        if self._sequences and idle > self._config.engine.watchdog_seconds:
            raise EngineDeadError(f"no step for {idle:.0f} s with {len(self._sequences)} requests pending")

    def stats(self) -> dict[str, Any]:
        """Totals and the present state, JSON-able."""
        return {
            **self.totals.as_dict(),
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "preemptions": self.scheduler.num_preemptions,
            "pages": {"total": self._allocator.num_pages, "free": self._allocator.num_free},
            "policy": self._config.verification.policy,
            "num_draft_tokens": self._num_draft_tokens,
            "draft_budget": self.budget.in_force,
            "budgets": {"from_controller": self.budget.from_controller, "local": self.budget.from_local},
            "cost_table": json.loads(self.cost_table.to_json()) if self.cost_table else None,
            "target": {"dtype": self.info.dtype, "device": self.info.device, "max_model_len": self.info.max_model_len},
            "executor": self._executor.describe(),
        }
