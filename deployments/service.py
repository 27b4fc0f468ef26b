"""From checked bodies to engine requests and their streams: tokens, context limits, choices, admission.

Knows the backend and the tokenizer, but neither HTTP nor the shape of OpenAI's answers.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from deployments.backend import Backend, ModelCard
from deployments.protocol import (
    COMPLETION_MAX_TOKENS,
    ChatCompletionRequest,
    CompletionRequest,
    GenerateRequest,
    Prompt,
)
from deployments.streams import merge, with_first
from deployments.tokenization import PromptEncoder
from dspark_ray.config import AppConfig
from dspark_ray.errors import QueueFullError, RequestError
from dspark_ray.request import GenerationChunk, GenerationRequest

Events = AsyncGenerator[tuple[int, GenerationChunk], None]  # (choice index, chunk)


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request as the engine sees it: request i is choice i."""

    id: str
    created: int  # Unix seconds
    model: str
    requests: tuple[GenerationRequest, ...]
    num_prompt_tokens: int  # each prompt once, whatever n is
    echoes: tuple[str, ...]  # what each choice's text begins with


@dataclass(frozen=True, slots=True)
class _Model:
    card: ModelCard
    encoder: PromptEncoder | None


class GenerationService:
    """Prepares and runs jobs for one ingress replica; bounds how many generate at a time."""

    def __init__(self, backend: Backend, config: AppConfig) -> None:
        self.backend = backend
        self.model_name = config.target.name
        self.created = int(time.time())
        self._serving = config.serving
        self._max_choices = config.engine.max_queued
        self._model: _Model | None = None
        self._loading = asyncio.Lock()
        self._num_jobs = 0

    @property
    def num_jobs(self) -> int:
        """HTTP requests that generate now."""
        return self._num_jobs

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise RequestError(
                f"the model {name!r} does not exist; this server serves {self.model_name!r}",
                param="model",
                code="model_not_found",
                status=404,
            )

    async def chat_job(self, body: ChatCompletionRequest) -> Job:
        self.check_model(body.model)
        self._check_choices(body.num_choices, 1)
        model = await self._loaded()
        messages = [message.for_template() for message in body.messages]
        prompt = await _required(model.encoder).encode_chat(messages)
        return self._job("chatcmpl", body, [prompt], model.card, param="messages", default_tokens=None)

    async def completion_job(self, body: CompletionRequest) -> Job:
        self.check_model(body.model)
        self._check_choices(body.num_choices, len(body.prompt))
        model = await self._loaded()
        prompts = [await _token_ids(prompt, model.encoder) for prompt in body.prompt]
        echoes = [_text(prompt, model.encoder) for prompt in body.prompt] if body.echo else None
        return self._job("cmpl", body, prompts, model.card, "prompt", COMPLETION_MAX_TOKENS, echoes)

    async def open(self, job: Job) -> Events:
        """Start a job and wait for its first chunk, so that whatever fails early still has an HTTP status.

        Raises QueueFullError when this replica generates for `max_ongoing_requests` others already. Closing the
        returned stream aborts every request of the job.
        """
        events = self._events(job.requests)
        return with_first(await anext(events), events)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationChunk, None]:
        """The same for Python callers: one typed request, its chunks with text, token ids and counts."""
        model = await self._loaded()
        if request.messages is not None:
            prompt = await _required(model.encoder).encode_chat(request.messages)
        elif request.prompt is not None:
            prompt = await _token_ids(request.prompt, model.encoder)
        else:
            prompt = list(request.prompt_token_ids or ())
        _check_prompt(prompt, model.card, "prompt")
        _check_tokens(request.sampling.stop_token_ids, model.card, "stop_token_ids")
        _max_tokens(request.sampling.max_tokens, None, len(prompt), model.card, "prompt")
        generation = GenerationRequest(
            request.request_id, tuple(prompt), request.sampling, request.speculation, request.num_draft_tokens
        )
        async with aclosing(self._events((generation,))) as events:
            async for _, chunk in events:
                yield chunk

    async def _events(self, requests: tuple[GenerationRequest, ...]) -> Events:
        limit = self._serving.max_ongoing_requests
        if self._num_jobs >= limit:
            raise QueueFullError(f"{self._num_jobs} requests are being answered already (limit {limit}); try again")
        self._num_jobs += 1
        try:
            sources = [self.backend.generate(request) for request in requests]
            async with aclosing(merge(sources, self._serving.request_timeout_seconds)) as merged:
                async for event in merged:
                    yield event
        finally:
            self._num_jobs -= 1

    async def check_ready(self) -> None:
        """Raises UnavailableError, with the reason, while a request sent now would not be answered."""
        await self.backend.check_ready()
        await self._loaded()

    async def _loaded(self) -> _Model:
        async with self._loading:
            if self._model is None:
                card = await self.backend.card()
                self._model = _Model(card, await asyncio.to_thread(PromptEncoder.from_files, card.tokenizer_files))
            return self._model

    def _check_choices(self, num_choices: int, num_prompts: int) -> None:
        if num_choices > self._serving.max_n:
            raise RequestError(f"n must be at most {self._serving.max_n}, got {num_choices}", param="n")
        if num_choices * num_prompts > self._max_choices:
            raise RequestError(
                f"{num_prompts} prompts with n={num_choices} make more than {self._max_choices} choices", param="prompt"
            )

    def _job(
        self,
        prefix: str,
        body: ChatCompletionRequest | CompletionRequest,
        prompts: list[list[int]],
        card: ModelCard,
        param: str,
        default_tokens: int | None,
        echoes: list[str] | None = None,
    ) -> Job:
        job_id = f"{prefix}-{uuid.uuid4().hex}"
        _check_tokens(body.stop_token_ids or (), card, "stop_token_ids")
        requests: list[GenerationRequest] = []
        for prompt in prompts:
            _check_prompt(prompt, card, param)
            max_tokens = _max_tokens(body.token_limit, default_tokens, len(prompt), card, param)
            for choice in range(body.num_choices):
                requests.append(
                    GenerationRequest(
                        request_id=f"{job_id}-{len(requests)}",
                        prompt_token_ids=tuple(prompt),
                        sampling=body.sampling(choice, max_tokens),
                        speculation=body.speculation_options.enabled,
                        num_draft_tokens=body.speculation_options.num_draft_tokens,
                    )
                )
        return Job(
            id=job_id,
            created=int(time.time()),
            model=self.model_name,
            requests=tuple(requests),
            num_prompt_tokens=sum(len(prompt) for prompt in prompts),
            echoes=tuple(echo for echo in echoes or [""] * len(prompts) for _ in range(body.num_choices)),
        )


def _required(encoder: PromptEncoder | None) -> PromptEncoder:
    if encoder is None:
        raise RequestError(
            "this model has no tokenizer: send token ids as the prompt of /v1/completions", param="prompt"
        )
    return encoder


async def _token_ids(prompt: Prompt, encoder: PromptEncoder | None) -> list[int]:
    return await _required(encoder).encode_text(prompt) if isinstance(prompt, str) else prompt


def _text(prompt: Prompt, encoder: PromptEncoder | None) -> str:
    return prompt if isinstance(prompt, str) else _required(encoder).decode(prompt)


def _check_prompt(prompt: list[int], card: ModelCard, param: str) -> None:
    """Raise RequestError unless the prompt has a token and leaves room for another, and all are in the vocabulary."""
    if not prompt:
        raise RequestError(f"{param} must hold at least one token", param=param, code="empty_prompt")
    if len(prompt) >= card.max_model_len:
        raise RequestError(
            f"this model's maximum context length is {card.max_model_len} tokens, but {param} has {len(prompt)}: "
            "it must leave room for at least one more",
            param=param,
            code="context_length_exceeded",
        )
    _check_tokens(prompt, card, param)


def _check_tokens(token_ids: list[int] | tuple[int, ...], card: ModelCard, param: str) -> None:
    for token in token_ids:
        if not 0 <= token < card.vocab_size:
            raise RequestError(
                f"{param} holds token id {token}, but the vocabulary is 0..{card.vocab_size - 1}",
                param=param,
                code="invalid_token_id",
            )


def _max_tokens(asked: int | None, default: int | None, prompt_len: int, card: ModelCard, param: str) -> int:
    """Tokens to generate: what was asked, or the default (None: all the room there is) as far as there is room."""
    room = card.max_model_len - prompt_len
    if asked is None:
        return room if default is None else min(default, room)
    if asked > room:
        raise RequestError(
            f"this model's maximum context length is {card.max_model_len} tokens, but {prompt_len} in {param} and "
            f"{asked} to generate were asked for; at most {room} can be generated",
            param=param,
            code="context_length_exceeded",
        )
    return asked
