"""Runs the engine's steps on Ray: the ranks of one target group and the drafters leased to it.

One remote call per actor and step; drafts and features go from actor to actor as ObjectRefs and never pass here.
Knows nothing of requests' contents, nor of who grants leases. Letters: D drafters, R rows of a step.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from dspark_ray.algorithm.cost_table import CostTable
from dspark_ray.config import AppConfig
from dspark_ray.engine.batch import StepPlan, StepResult, TargetInfo
from dspark_ray.errors import DSparkError, ExecutorError
from dspark_ray.workers.draft_routes import DraftRoutes, PendingDraft, RoutedStep
from dspark_ray.workers.target_group import TargetGroup

logger = logging.getLogger(__name__)

GRACE_SECONDS = 5.0  # for the other ranks, once one has failed: a collective without its peer may never return


@dataclass(frozen=True, slots=True)
class SubmittedStep:
    """One try at a step: what was asked of whom."""

    routed: RoutedStep
    drafts: tuple[PendingDraft, ...]  # given to every rank, in this order
    ranks: tuple[Any, ...]  # ObjectRef of each rank's answer
    features: tuple[Any, ...]  # ObjectRef of each drafter's FeatureBatch
    proposals: dict[str, Any]  # ObjectRef of each called drafter's next DraftBatch


class DraftsLost(DSparkError):
    """No rank ran the step because these drafts could not be had."""

    def __init__(self, drafts: list[PendingDraft]) -> None:
        super().__init__(f"drafts of {[draft.drafter_id for draft in drafts]} were lost")
        self.drafts = drafts


class RayExecutor:
    """The engine's Executor over Ray actors (engine/executor.py). Steps run one after the other.

    A lost drafter costs its requests their drafts until they find another. A lost rank costs the group: all ranks are
    killed, ExecutorError is raised, and `restart` builds a new group in the same placement.
    """

    def __init__(self, config: AppConfig, app_name: str, group: str, drafters: Iterable[tuple[str, Any]] = ()) -> None:
        self._config = config
        self._group = TargetGroup(config, app_name, group)
        self._handles: dict[str, Any] = dict(drafters)  # by drafter id, those that the next step may call
        self._leased = self._handles
        self._routes = DraftRoutes()
        self._lost: set[str] = set()
        self._cost_table: CostTable | None = None

    @property
    def epoch(self) -> int:
        """Counts the groups built: 1, then one more with every restart."""
        return self._group.epoch

    @property
    def lost_drafters(self) -> tuple[str, ...]:
        """Drafters seen dead; their ids are never used again."""
        return tuple(sorted(self._lost))

    async def start(self) -> TargetInfo:
        return await self._group.build()

    async def profile(self) -> CostTable:
        """Every rank's step times are measured together; rank 0's count. Includes the time of a draft and its hop."""
        tables = await self._group.call_all("profile")
        return replace(tables[0], draft_seconds=await self._draft_seconds())

    async def set_cost_table(self, table: CostTable | None) -> None:
        """Give every rank the same table: each computes the same admission from it."""
        await self._group.call_all("set_cost_table", table)
        self._cost_table = table

    async def restart(self) -> None:
        self._group.kill()
        self._routes.forget_tokens()
        await self._group.build()
        await self.set_cost_table(self._cost_table)

    async def close(self) -> None:
        """Kill the ranks and remove the placement group if it was made here. Drafters belong to others."""
        self._group.close()

    def set_drafters(self, drafters: Sequence[tuple[str, Any]]) -> None:
        """The drafters leased at present, as (id, actor handle); takes effect with the next step."""
        self._leased = {drafter_id: handle for drafter_id, handle in drafters if drafter_id not in self._lost}

    def rest_below(self, expected_accepts: float) -> None:
        """Requests whose past drafts had fewer expected accepts rest from drafting (0: none; drafters have room)."""
        self._routes.rest_below = expected_accepts

    def describe(self) -> dict[str, Any]:
        return {
            "executor": "ray",
            **self._group.describe(),
            "drafters": self._routes.num_requests,
            "lost_drafters": list(self.lost_drafters),
            "resting_requests": self._routes.num_resting,
        }

    async def step(self, plan: StepPlan, finished: tuple[str, ...], histories: Mapping[str, np.ndarray]) -> StepResult:
        """One step, drafts for the next under way when it returns. ExecutorError if the group is lost.

        A lost drafter's draft makes the call fail on every rank before the step runs; then the same plan is submitted
        again without it.
        """
        self._routes.finish(finished)
        while True:
            self._take_leases()
            submitted = self._submit(plan, histories)
            try:
                result = await self._result(submitted)
            except DraftsLost as lost:
                await self._drop(lost.drafts)
                continue
            self._routes.commit(plan, submitted.routed, submitted.proposals, result)
            return result

    def _take_leases(self) -> None:
        """Switch to the drafters leased at present; those that leave are told to forget our requests."""
        for drafter_id, request_ids in self._routes.update_drafters(self._leased).items():
            if request_ids and drafter_id not in self._lost:
                self._handles[drafter_id].forget.remote(request_ids)
        self._handles = self._leased

    def _submit(self, plan: StepPlan, histories: Mapping[str, np.ndarray]) -> SubmittedStep:
        """Call every rank, then at once the drafters with the features that rank 0 will have: nothing is awaited."""
        routed = self._routes.route(plan, histories)
        drafts = tuple(self._routes.drafts_for(plan))
        plan = replace(plan, routes=routed.routes, wants_draft=routed.wants_draft)
        ranks, features = self._group.execute(plan, len(routed.drafter_ids), [draft.ref for draft in drafts])
        proposals = {
            drafter_id: self._handles[drafter_id].propose.remote(routed.plans[drafter_id], feature)
            for drafter_id, feature in zip(routed.drafter_ids, features, strict=True)
            if drafter_id in routed.plans
        }
        return SubmittedStep(routed, drafts, tuple(ranks), tuple(features), proposals)

    async def _result(self, submitted: SubmittedStep) -> StepResult:
        """Rank 0's answer. Raises DraftsLost if no rank ran the step for want of drafts, else ExecutorError."""
        answers = [quiet_future(ref) for ref in submitted.ranks]
        await self._wait(answers, submitted.drafts)
        errors = [answer.exception() if answer.done() else TimeoutError("no answer") for answer in answers]
        if not any(errors):
            return answers[0].result()
        for ref in (*submitted.features, *submitted.proposals.values()):
            quiet_future(ref)  # they fail with the ranks; one reason is enough
        if all(argument_failed(error) for error in errors):
            lost = [draft for draft in submitted.drafts if await failure_of(draft.ref) is not None]
            if lost:
                raise DraftsLost(lost)
        self._group.kill()
        self._routes.forget_tokens()
        reasons = "; ".join(f"rank {rank}: {first_line(error)}" for rank, error in enumerate(errors) if error)
        raise ExecutorError(f"target group {self._group.name} lost: {reasons}")

    async def _wait(self, answers: list["asyncio.Future[Any]"], drafts: tuple[PendingDraft, ...]) -> None:
        """Until every rank has answered, one has failed (and the others had their grace), or the watchdog ends it.

        A drafter that holds the step up for `step_timeout_seconds` is killed, which turns its draft into an error.
        """
        watchdog = self._config.engine.watchdog_seconds
        patience = min(self._config.drafter.step_timeout_seconds, watchdog) if drafts else watchdog
        deadline = time.monotonic() + watchdog
        await asyncio.wait(answers, timeout=patience, return_when=asyncio.FIRST_EXCEPTION)
        if nothing_yet(answers):
            self._kill_stalled(drafts)
            left = max(0.0, deadline - time.monotonic())
            await asyncio.wait(answers, timeout=left, return_when=asyncio.FIRST_EXCEPTION)
        if not all(answer.done() for answer in answers):
            await asyncio.wait(answers, timeout=GRACE_SECONDS)

    def _kill_stalled(self, drafts: tuple[PendingDraft, ...]) -> None:
        refs = {draft.ref: draft.drafter_id for draft in drafts}
        if not refs:
            return
        _, stalled = ray.wait(list(refs), num_returns=len(refs), timeout=0, fetch_local=False)
        for ref in stalled:
            handle = self._handles.get(refs[ref])
            if handle is not None:
                logger.error(
                    "drafter %s stalled a step for %g s and is killed",
                    refs[ref],
                    self._config.drafter.step_timeout_seconds,
                )
                ray.kill(handle)

    async def _drop(self, drafts: list[PendingDraft]) -> None:
        """Forget lost drafts; a drafter that is dead is forgotten for good."""
        self._routes.discard(drafts)
        for draft in drafts:
            error = await failure_of(draft.ref)
            logger.warning("draft of %s lost: %s", draft.drafter_id, first_line(error))
            if isinstance(error, RayActorError) and not isinstance(error, RayTaskError):
                self._lost.add(draft.drafter_id)
                self._leased = {other: handle for other, handle in self._leased.items() if other != draft.drafter_id}

    async def _draft_seconds(self) -> float:
        """Of one draft by the first drafter that answers, with a round trip to it; 0 without drafters."""
        shape = (await self._group.call_all("feature_shape"))[0]
        for drafter_id, handle in self._leased.items():
            try:
                seconds = await handle.profile.remote(*shape)
                started = time.perf_counter()
                await handle.ping.remote()
                return float(seconds) + time.perf_counter() - started
            except RayError as error:
                logger.warning("drafter %s could not be profiled: %s", drafter_id, first_line(error))
        return 0.0


def quiet_future(ref: Any) -> "asyncio.Future[Any]":
    """A future of the ref's value whose error, if nobody asks for it, is logged neither by asyncio nor by Ray."""
    future = asyncio.wrap_future(ref.future())
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


def nothing_yet(answers: list["asyncio.Future[Any]"]) -> bool:
    """Whether some rank has not answered and none has failed."""
    return not all(answer.done() for answer in answers) and not any(
        answer.done() and answer.exception() for answer in answers
    )


def argument_failed(error: BaseException | None) -> bool:
    """Whether a rank's call failed before the step ran: TargetWorker turns every error inside into ExecutorError,
    and the death of the rank itself is not a RayTaskError."""
    return isinstance(error, RayTaskError) and not isinstance(error.cause, ExecutorError)


async def failure_of(ref: Any) -> RayError | None:
    """The error of a draft, None if it is there (or still under way)."""
    ready, _ = ray.wait([ref], timeout=0, fetch_local=False)
    if not ready:
        return None
    try:
        await asyncio.wait_for(quiet_future(ref), GRACE_SECONDS)
    except (TimeoutError, GetTimeoutError):
        return None
    except RayError as error:
        return error
    return None


def first_line(error: BaseException | None) -> str:
    """The cause in one line: Ray's errors carry whole tracebacks."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    return f"{type(cause).__name__}: {str(cause).strip().splitlines()[0] if str(cause).strip() else ''}"
