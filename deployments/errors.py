"""Every failure as OpenAI's error object: `{"error": {message, type, param, code}}` with the right status.

Knows nothing of routes or models; it only translates exceptions.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from dspark_ray.errors import DSparkError, EngineDeadError, QueueFullError, RequestError

logger = logging.getLogger("ray.serve")


class UnavailableError(DSparkError):
    """Nobody can answer now (HTTP 503): the model is loading, or no replica came back in time."""

    def __init__(self, message: str, retry_after_seconds: float = 5.0) -> None:
        super().__init__(message, retry_after_seconds)
        self.message = message
        self.retry_after_seconds = retry_after_seconds

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class ApiError:
    """One failure in OpenAI's words."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    retry_after_seconds: float | None = None

    def body(self) -> dict[str, Any]:
        # A message may quote what a client sent, which may be no valid Unicode.
        message = self.message.encode(errors="replace").decode()
        return {"error": {"message": message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {}
        if self.retry_after_seconds is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_seconds)))
        return JSONResponse(self.body(), status_code=self.status, headers=headers)


def to_api_error(error: Exception) -> ApiError:
    """The OpenAI error of any exception; what is not known to be the client's fault is a 500 without details."""
    match error:
        case RequestError():
            return ApiError(error.status, error.message, "invalid_request_error", error.param, error.code)
        case QueueFullError():
            return ApiError(429, str(error), "rate_limit_error", None, "rate_limit_exceeded", 1.0)
        case UnavailableError():
            return ApiError(503, error.message, "server_error", None, "unavailable", error.retry_after_seconds)
        case EngineDeadError():
            return ApiError(503, str(error), "server_error", None, "unavailable", 5.0)
        case TimeoutError():
            message = str(error) or "the request took longer than the server allows"
            return ApiError(408, message, "timeout_error", None, "request_timeout")
        case HTTPException():
            return ApiError(error.status_code, _http_message(error), _http_type(error.status_code))
    return ApiError(500, "the server failed to answer this request", "server_error", None, "internal_error")


def _http_message(error: HTTPException) -> str:
    return {404: "no such route", 405: "method not allowed on this route"}.get(error.status_code, str(error.detail))


def _http_type(status: int) -> str:
    return "server_error" if status >= 500 else "invalid_request_error"


def to_request_error(errors: Sequence[Mapping[str, Any]]) -> RequestError:
    """The first of pydantic's complaints, as a RequestError that names the field."""
    first = errors[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, RequestError):
        return cause
    if first["type"] == "json_invalid":
        return RequestError("the body is not valid JSON", code="invalid_json")
    param = field_path(first["loc"])
    if first["type"] == "missing":
        return RequestError(f"missing required field: {param or 'the JSON body'}", param=param, code="missing_field")
    if param is None:
        return RequestError("the body must be a JSON object, sent as application/json", code="invalid_json")
    return RequestError(f"{param}: {first['msg'].removeprefix('Value error, ')}", param=param, code="invalid_value")


def field_path(loc: Sequence[str | int]) -> str | None:
    """`("body", "messages", 0, "role")` as OpenAI writes it: `messages[0].role`."""
    path = ""
    for part in loc[1:] if loc and loc[0] == "body" else loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.lstrip(".") or None


def install_error_handlers(app: FastAPI) -> None:
    """Make every error of `app`, known or not, leave as OpenAI JSON."""

    async def on_error(_: Request, error: Exception) -> JSONResponse:
        return to_api_error(error).response()

    async def on_invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return to_api_error(to_request_error(error.errors())).response()

    for kind in (DSparkError, TimeoutError, HTTPException, Exception):
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
