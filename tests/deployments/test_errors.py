"""Every failure has OpenAI's shape and the right status."""

import pickle
from pathlib import Path

import pytest
from starlette.exceptions import HTTPException

from deployments.errors import UnavailableError, field_path, to_api_error
from dspark_ray.errors import EngineDeadError, QueueFullError, RequestError


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "retries"),
    [
        (RequestError("m", param="p", code="c"), 400, "invalid_request_error", "c", False),
        (RequestError("m", status=404), 404, "invalid_request_error", None, False),
        (QueueFullError("m"), 429, "rate_limit_error", "rate_limit_exceeded", True),
        (UnavailableError("m"), 503, "server_error", "unavailable", True),
        (EngineDeadError("m"), 503, "server_error", "unavailable", True),
        (TimeoutError(), 408, "timeout_error", "request_timeout", False),
        (HTTPException(405), 405, "invalid_request_error", None, False),
        (ZeroDivisionError("secret"), 500, "server_error", "internal_error", False),
    ],
)
def test_errors_become_openai_objects(error: Exception, status: int, kind: str, code: str, retries: bool) -> None:
    api_error = to_api_error(error)
    response = api_error.response()
    assert response.status_code == status
    assert ("retry-after" in response.headers) is retries
    body = api_error.body()["error"]
    assert list(body) == ["message", "type", "param", "code"]
    assert (body["type"], body["code"]) == (kind, code)
    assert body["message"]


def test_unknown_errors_tell_clients_nothing_of_the_inside() -> None:
    assert "secret" not in to_api_error(ZeroDivisionError("secret")).message


def test_a_message_that_is_no_unicode_can_still_be_sent() -> None:
    assert to_api_error(RequestError("model \ud800")).response().status_code == 400


def test_field_paths_read_as_openai_writes_them() -> None:
    assert field_path(("body", "messages", 0, "role")) == "messages[0].role"
    assert field_path(("body",)) is None
    assert field_path(()) is None


def test_unavailability_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(UnavailableError("away", 7.0)))
    assert (str(error), error.retry_after_seconds) == ("away", 7.0)


def test_no_module_of_the_ingress_mentions_torch() -> None:
    folder = Path(__file__).resolve().parents[2] / "deployments"
    for name in ("api", "errors", "ingress", "protocol", "responses", "serve_backend", "service", "tokenization"):
        assert "import torch" not in (folder / f"{name}.py").read_text()
