"""Chunks as OpenAI's answers: whole bodies and server-sent events, for both endpoints. Knows no engine and no route."""

import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from deployments.errors import to_api_error
from deployments.service import Events, Job
from dspark_ray.request import FinishReason, GenerationChunk, SpeculationCounts

logger = logging.getLogger("ray.serve")


@dataclass(slots=True)
class UsageTally:
    """Counts tokens, not chunks: a chunk holds as many as its step accepted."""

    prompt_tokens: int
    completion_tokens: int = 0
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)

    def add(self, chunk: GenerationChunk) -> None:
        self.completion_tokens += len(chunk.token_ids)
        self.counts += chunk.counts

    def as_dict(self) -> dict[str, Any]:
        counts = self.counts
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens_details": {
                "accepted_prediction_tokens": counts.accepted,
                "rejected_prediction_tokens": counts.admitted - counts.accepted,
            },
            "speculation": {
                "drafted": counts.drafted,
                "admitted": counts.admitted,
                "accepted": counts.accepted,
                "emitted": counts.emitted,
            },
        }


class AnswerFormat(Protocol):
    """How one endpoint spells its answers."""

    object_whole: str
    object_delta: str

    def whole(self, index: int, text: str, finish_reason: FinishReason | None) -> dict[str, Any]: ...

    def delta(self, index: int, text: str, finish_reason: FinishReason | None, first: bool) -> dict[str, Any]: ...


class ChatFormat:
    """/v1/chat/completions."""

    object_whole = "chat.completion"
    object_delta = "chat.completion.chunk"

    def whole(self, index: int, text: str, finish_reason: FinishReason | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish_reason}

    def delta(self, index: int, text: str, finish_reason: FinishReason | None, first: bool) -> dict[str, Any]:
        content = {"content": text} if text or first else {}
        delta = {"role": "assistant", **content} if first else content
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


class CompletionFormat:
    """/v1/completions, whose streamed and whole choices are spelled alike."""

    object_whole = "text_completion"
    object_delta = "text_completion"

    def whole(self, index: int, text: str, finish_reason: FinishReason | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}

    def delta(self, index: int, text: str, finish_reason: FinishReason | None, first: bool) -> dict[str, Any]:
        return self.whole(index, text, finish_reason)


async def whole_answer(job: Job, events: Events, form: AnswerFormat) -> dict[str, Any]:
    """Read a job to its end and answer with all of it."""
    tally = UsageTally(job.num_prompt_tokens)
    texts = list(job.echoes)
    reasons: list[FinishReason | None] = [None] * len(texts)
    async with aclosing(events):
        async for index, chunk in events:
            tally.add(chunk)
            texts[index] += chunk.text
            reasons[index] = chunk.finish_reason or reasons[index]
    choices = [form.whole(index, text, reasons[index]) for index, text in enumerate(texts)]
    return {**_envelope(job, form.object_whole), "choices": choices, "usage": tally.as_dict()}


async def event_stream(
    job: Job, events: Events, form: AnswerFormat, *, include_usage: bool
) -> AsyncGenerator[str, None]:
    """Server-sent events, each sent as soon as its chunk is there.

    A failure after the first chunk, when the status is out already, is one error event; the stream then closes
    without [DONE].
    """
    tally = UsageTally(job.num_prompt_tokens)
    envelope = _envelope(job, form.object_delta) | ({"usage": None} if include_usage else {})
    started: set[int] = set()
    try:
        async with aclosing(events):
            async for index, chunk in events:
                tally.add(chunk)
                first = index not in started
                # A step may add tokens whose text is held back (part of a stop string or of a code point).
                if not (first or chunk.text or chunk.finish_reason):
                    continue
                started.add(index)
                text = (job.echoes[index] if first else "") + chunk.text
                yield _sse({**envelope, "choices": [form.delta(index, text, chunk.finish_reason, first)]})
        if include_usage:
            yield _sse({**envelope, "choices": [], "usage": tally.as_dict()})
        yield "data: [DONE]\n\n"
    except Exception as error:
        api_error = to_api_error(error)
        if api_error.status == 500:
            logger.exception("stream %s failed", job.id)
        yield _sse(api_error.body())


def _envelope(job: Job, kind: str) -> dict[str, Any]:
    return {"id": job.id, "object": kind, "created": job.created, "model": job.model}


def _sse(payload: dict[str, Any]) -> str:
    return f"data: {json.dumps(payload, separators=(',', ':'))}\n\n"
