"""OpenAI's request bodies, checked field by field, and what they mean to the engine. Knows no HTTP and no tokenizer.

Bodies are strict: a wrong type is an error, never a guess. Fields this server does not know are ignored, as OpenAI's
own SDKs expect of compatible servers; known fields that would change the output but are not served are refused.
"""

import uuid
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from dspark_ray.errors import RequestError
from dspark_ray.request import MAX_SEED, SamplingParams, VerificationMode

Prompt = str | list[int]
COMPLETION_MAX_TOKENS = 16  # OpenAI's default of the completions endpoint
LEAST_TOP_P = 1e-6  # top_p 0 keeps the likeliest token alone, as this does

# Fields of OpenAI (and of common extensions) that change the output and are not served, with their neutral values.
NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "logit_bias": (None, {}),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_tokens": (None, 0),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "response_format": (None, {"type": "text"}),
    "tools": (None, []),
    "functions": (None, []),
    "audio": (None,),
}


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """What Python callers of the Serve handle send: exactly one of `prompt`, `messages`, `prompt_token_ids`."""

    prompt: str | None = None
    messages: tuple[dict[str, str], ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    speculation: bool = True
    num_draft_tokens: int | None = None
    request_id: str = field(default_factory=lambda: f"gen-{uuid.uuid4().hex}")

    def __post_init__(self) -> None:
        given = [name for name in ("prompt", "messages", "prompt_token_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            raise RequestError(
                f"give exactly one of prompt, messages and prompt_token_ids, got {', '.join(given) or 'none'}",
                param="prompt",
            )


def normalize_prompt(value: Any) -> list[Prompt]:
    """A string, token ids, or a list of either, as a list of prompts.

    Raises RequestError naming the first part that is none of these or empty.
    """
    if isinstance(value, str):
        return [_text_prompt(value, "prompt")]
    if not isinstance(value, list):
        raise RequestError(
            f"prompt must be a string, a list of strings, token ids or a list of token-id lists, got {_kind(value)}",
            param="prompt",
        )
    if not value:
        raise RequestError("prompt must not be empty", param="prompt", code="empty_prompt")
    if isinstance(value[0], int):
        return [_token_prompt(value, "prompt")]
    return [_one_prompt(part, f"prompt[{index}]") for index, part in enumerate(value)]


def _one_prompt(value: Any, param: str) -> Prompt:
    if isinstance(value, str):
        return _text_prompt(value, param)
    if isinstance(value, list):
        return _token_prompt(value, param)
    raise RequestError(f"{param} must be a string or a list of token ids, got {_kind(value)}", param=param)


def _text_prompt(text: str, param: str) -> str:
    if not text:
        raise RequestError(f"{param} must not be empty", param=param, code="empty_prompt")
    try:
        return check_unicode(text)
    except ValueError as error:
        raise RequestError(f"{param} {error}", param=param) from error


def _token_prompt(token_ids: list[Any], param: str) -> list[int]:
    if not token_ids:
        raise RequestError(f"{param} must not be empty", param=param, code="empty_prompt")
    for index, token in enumerate(token_ids):
        if not isinstance(token, int) or isinstance(token, bool):
            raise RequestError(f"{param}[{index}] must be a token id, got {_kind(token)}", param=f"{param}[{index}]")
    return token_ids


def check_unicode(text: str) -> str:
    """JSON can spell half of a surrogate pair, which is no text: raise ValueError rather than fail in the tokenizer."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("holds half of a surrogate pair, which is not valid Unicode") from error
    return text


Text = Annotated[str, AfterValidator(check_unicode)]


def _kind(value: Any) -> str:
    names = {
        type(None): "null",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        dict: "an object",
        list: "a list",
    }
    return names.get(type(value), type(value).__name__)


def normalize_stop(value: Any) -> list[str]:
    """`stop` as a list: null, a string or a list of non-empty strings."""
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise RequestError(f"stop must be a string or a list of strings, got {_kind(value)}", param="stop")
    if "" in stops:
        raise RequestError("stop must not contain an empty string", param="stop")
    return stops


def normalize_content(value: Any) -> str:
    """The text of a message: a string, or a list of text parts, joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"must be a string or a list of text parts, got {_kind(value)}")
    return "".join(_part_text(part) for part in value)


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        raise ValueError(f"must hold parts of the form {{'type': 'text', 'text': ...}} only, got type {kind!r}")
    return part["text"]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class StreamOptions(_Body):
    include_usage: bool | None = None


class SpeculationOptions(BaseModel):
    """This server's extension: how one request is speculated. The output distribution never depends on it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    enabled: bool = True
    num_draft_tokens: int | None = Field(None, ge=0, le=32)
    verification: VerificationMode = "auto"


class ChatMessage(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Text, BeforeValidator(normalize_content)]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """`developer` is what newer OpenAI clients call `system`; templates know the older word."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class _SamplingBody(_Body):
    """The fields that both endpoints share."""

    model: Text | None = None
    temperature: float | None = Field(None, allow_inf_nan=False)
    top_p: float | None = Field(None, allow_inf_nan=False)
    top_k: int | None = None
    min_p: float | None = Field(None, allow_inf_nan=False)
    max_tokens: int | None = None
    stop: Annotated[list[Text], BeforeValidator(normalize_stop)] = []
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    n: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    speculation: SpeculationOptions | None = None

    @model_validator(mode="after")
    def _refuse_what_is_not_served(self) -> "_SamplingBody":
        for name, value in (self.model_extra or {}).items():
            if name in NOT_SERVED and not _is_neutral(name, value):
                raise RequestError(f"{name} is not supported by this server", param=name, code="unsupported_parameter")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed when stream is true", param="stream_options")
        return self

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def speculation_options(self) -> SpeculationOptions:
        return self.speculation or SpeculationOptions()

    @property
    def token_limit(self) -> int | None:
        """The most tokens a choice may have, where the client said."""
        return self.max_tokens

    def sampling(self, choice: int, max_tokens: int) -> SamplingParams:
        """How choice number `choice` is sampled. With a seed, choice c has seed + c, so each can be had alone.

        Raises RequestError for values out of range.
        """
        top_p = 1.0 if self.top_p is None else self.top_p
        return SamplingParams(
            temperature=1.0 if self.temperature is None else float(self.temperature),
            top_k=self.top_k or 0,
            top_p=LEAST_TOP_P if top_p == 0 else float(top_p),
            min_p=float(self.min_p or 0.0),
            seed=None if self.seed is None else _choice_seed(self.seed, choice),
            max_tokens=max_tokens,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            verification=self.speculation_options.verification,
        )


def _is_neutral(name: str, value: Any) -> bool:
    # A plain `in` would take 0 for False: logprobs 0 asks for something, logprobs false does not.
    return any(
        value == neutral and isinstance(value, bool) is isinstance(neutral, bool) for neutral in NOT_SERVED[name]
    )


def _choice_seed(seed: int, choice: int) -> int:
    if not -MAX_SEED <= seed <= MAX_SEED:
        raise RequestError(f"seed must fit in 64 bits, got {seed}", param="seed")
    return seed + choice if seed + choice <= MAX_SEED else seed + choice - 2 * MAX_SEED


class ChatCompletionRequest(_SamplingBody):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(_SamplingBody):
    """POST /v1/completions."""

    prompt: Annotated[list[Prompt], BeforeValidator(normalize_prompt)]
    echo: bool | None = None
