"""A Backend over TargetServer replicas, through a Serve handle: routes, retries, continues streams of lost replicas.

Knows nothing of HTTP. Everything a request needs to go on elsewhere is its prompt and the tokens already emitted.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from deployments.backend import ModelCard, summary
from deployments.errors import UnavailableError
from dspark_ray.errors import EngineDeadError, QueueFullError
from dspark_ray.request import GenerationChunk, GenerationRequest

logger = logging.getLogger("ray.serve")

T = TypeVar("T")

PROBE_SECONDS = 3.0  # longest wait for a replica that only has to say something it knows
CARD_SECONDS = 1.0  # longest wait of a request for the model card: a replica that has loaded sends it at once
RETRY_SECONDS = 0.5  # between attempts to find a healthy replica


@dataclass(frozen=True, slots=True)
class StreamFailure:
    """An expected error of a stream, sent as a value: raised across Serve it would log a traceback per request."""

    error: Exception


class ReplicaLostError(Exception):
    """The replica behind a stream is gone; another may continue it."""


class ServeBackend:
    """Generates on whichever TargetServer replica Serve picks. Call `start` on the event loop that will use it."""

    def __init__(
        self, target: DeploymentHandle, controller: DeploymentHandle | None, *, failover_seconds: float
    ) -> None:
        self._target = target
        self._streaming = target.options(stream=True)
        self._controller = controller
        self._failover_seconds = failover_seconds
        self._card_task: asyncio.Task[ModelCard] | None = None

    def start(self) -> None:
        """Ask for the model card; the answer comes when a replica has loaded the model."""
        # Not asked for by a request: Serve would cancel the call with the request that made it.
        self._card_task = asyncio.create_task(self._fetch_card())

    async def card(self) -> ModelCard:
        assert self._card_task is not None, "start comes first"
        try:
            return await asyncio.wait_for(asyncio.shield(self._card_task), CARD_SECONDS)
        except TimeoutError as error:
            raise UnavailableError("the model is still loading") from error

    async def _fetch_card(self) -> ModelCard:
        while True:
            try:
                return await self._target.card.remote()
            except Exception as error:
                logger.debug("no model card yet: %s", error)
                await asyncio.sleep(RETRY_SECONDS)

    async def check_ready(self) -> None:
        await self.card()
        reason = await _probe(self._target.not_ready_because.remote(), "no target replica answers")
        if reason is not None:
            raise UnavailableError(reason)

    async def stats(self) -> dict[str, Any]:
        """Every target replica's counts, and the controller's view of the cluster (null while it is away)."""
        responses = self._target.broadcast("stats")
        targets = await _probe(
            asyncio.to_thread(responses.results, timeout_s=PROBE_SECONDS), "no target replica answers"
        )
        try:
            controller = None if self._controller is None else await _probe(self._controller.stats.remote(), "")
        except UnavailableError:
            controller = None
        return summary(targets, controller)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        """Stream a request to its end, over as many replicas as that takes.

        A replica that continues gets the tokens emitted so far as `resumed_token_ids`: it replays them through its
        output state (held-back text, split code points, stop strings) and sends only what follows, so nothing is lost
        or sent twice. UnavailableError when none has continued for `failover_seconds`.
        """
        emitted = list(request.resumed_token_ids)
        give_up_at: float | None = None  # set while no replica serves this request
        attempt = 0
        while True:
            current = replace(
                request, request_id=_attempt_id(request.request_id, attempt), resumed_token_ids=tuple(emitted)
            )
            try:
                async with aclosing(self._attempt(current, give_up_at)) as chunks:
                    async for chunk in chunks:
                        give_up_at = None
                        emitted.extend(chunk.token_ids)
                        yield replace(chunk, request_id=request.request_id)
                        if chunk.finish_reason is not None:
                            return
                raise ReplicaLostError("the stream ended early")
            except (ReplicaLostError, EngineDeadError) as error:
                now = time.monotonic()
                give_up_at = give_up_at or now + self._failover_seconds
                if now + RETRY_SECONDS >= give_up_at:
                    raise UnavailableError("no healthy replica could continue this request in time") from error
                logger.warning("request %s lost its replica: %s", request.request_id, error)
            attempt += 1
            await asyncio.sleep(RETRY_SECONDS)

    async def _attempt(
        self, request: GenerationRequest, give_up_at: float | None
    ) -> AsyncGenerator[GenerationChunk, None]:
        """One replica's part of a stream; the first item must come before `give_up_at`."""
        ended = False
        response = cast(DeploymentResponseGenerator[Any], self._streaming.generate.remote(request))
        try:
            while True:
                async with asyncio.timeout(None if give_up_at is None else give_up_at - time.monotonic()):
                    item = await anext(response)
                give_up_at = None
                if isinstance(item, StreamFailure):
                    ended = True
                    raise item.error
                ended = item.finish_reason is not None
                yield item
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise UnavailableError("no healthy replica could continue this request in time") from error
        except BackPressureError as error:
            raise QueueFullError(str(error)) from error
        except DeploymentUnavailableError as error:
            raise UnavailableError("the target deployment has failed; see `serve status`") from error
        except RayError as error:
            if isinstance(error, RayTaskError | TaskCancelledError):
                raise
            raise ReplicaLostError(type(error).__name__) from error
        finally:
            if not ended:
                response.cancel()


def _attempt_id(request_id: str, attempt: int) -> str:
    # A replica that was only out of reach may still hold the first attempt under its own id.
    return request_id if attempt == 0 else f"{request_id}~{attempt}"


async def _probe(call: Awaitable[T], otherwise: str) -> T:
    """Await a short call; UnavailableError(otherwise) if it fails or takes longer than PROBE_SECONDS."""
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            return await call
    except (TimeoutError, RayError, DeploymentUnavailableError, BackPressureError) as error:
        raise UnavailableError(otherwise) from error
