"""The HTTP surface: OpenAI's routes and this server's own, over a GenerationService. No Ray, no torch."""

from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse

from deployments.errors import install_error_handlers
from deployments.protocol import ChatCompletionRequest, CompletionRequest
from deployments.responses import AnswerFormat, ChatFormat, CompletionFormat, event_stream, whole_answer
from deployments.service import GenerationService, Job
from dspark_ray import __version__

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def create_api(service: GenerationService) -> FastAPI:
    """The ASGI application over `service`."""
    app = FastAPI(title="dspark_ray", version=__version__)
    install_error_handlers(app)
    _add_openai_routes(app, service)
    _add_own_routes(app, service)
    return app


def _add_openai_routes(app: FastAPI, service: GenerationService) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatCompletionRequest) -> Response:
        job = await service.chat_job(body)
        return await _answer(service, job, ChatFormat(), stream=body.stream, include_usage=body.include_usage)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest) -> Response:
        job = await service.completion_job(body)
        return await _answer(service, job, CompletionFormat(), stream=body.stream, include_usage=body.include_usage)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service)]}

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> dict[str, Any]:
        service.check_model(model_id)
        return _model(service)


def _add_own_routes(app: FastAPI, service: GenerationService) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Live: this process answers. Says nothing of the model."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        """Ready: a request sent now would be answered; else 503 with the reason."""
        await service.check_ready()
        return {"status": "ready", "model": service.model_name}

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        return {"model": service.model_name, "answering": service.num_jobs, **await service.backend.stats()}


async def _answer(
    service: GenerationService, job: Job, form: AnswerFormat, *, stream: bool | None, include_usage: bool
) -> Response:
    events = await service.open(job)
    if stream:
        body = event_stream(job, events, form, include_usage=include_usage)
        return StreamingResponse(body, media_type="text/event-stream", headers=STREAM_HEADERS)
    return JSONResponse(await whole_answer(job, events, form))


def _model(service: GenerationService) -> dict[str, Any]:
    return {"id": service.model_name, "object": "model", "created": service.created, "owned_by": "dspark_ray"}
