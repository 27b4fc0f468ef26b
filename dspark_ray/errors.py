"""The exception tree. Every error a user can cause says what was got, what was expected and what to do."""


class DSparkError(Exception):
    """Base of all errors raised by dspark_ray on purpose."""


class ConfigError(DSparkError, ValueError):
    """The configuration cannot be served: raised at start-up, never in the middle of a request."""


class UnsupportedModelError(ConfigError):
    """The checkpoint needs something that this code does not do; the message names it."""


class CheckpointError(ConfigError):
    """A checkpoint folder is incomplete or inconsistent; the message names the field or tensor."""


class RequestError(DSparkError, ValueError):
    """A request is invalid. `param` names the offending field, as in OpenAI's error object."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_request_error, (self.message, self.param, self.code, self.status))


def _rebuild_request_error(message: str, param: str | None, code: str | None, status: int) -> RequestError:
    return RequestError(message, param=param, code=code, status=status)


class QueueFullError(DSparkError):
    """Too many requests wait already (HTTP 429)."""


class EngineDeadError(DSparkError):
    """The target group is gone and could not be rebuilt (HTTP 503); another replica may continue the request."""


class ExecutorError(DSparkError):
    """A step failed because the target group failed; the engine rebuilds the group and recomputes."""


class PlacementError(DSparkError):
    """The cluster cannot place what the configuration asks for; the message lists what it has."""


class TrainingError(DSparkError):
    """Training over Ray failed more often than allowed; the message says why and where the last checkpoint is."""
