"""From new token ids to text and a finish reason, one step at a time: stop rules, incremental detokenisation.

Exact inside a block: a step may bring several tokens, and everything after the first stop is discarded.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from dspark_ray.request import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What a step adds to a request after the stop rules: the tokens kept, the text to show, why it ended."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None


class TextDecoder:
    """Tokens of a model folder as text, through the tokenizers library. One per engine, shared by its requests."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, folder: str | None) -> "TextDecoder | None":
        """None where the folder has no tokenizer.json: such a model serves token ids only."""
        path = Path(folder or "") / "tokenizer.json"
        return cls(Tokenizer.from_file(str(path))) if folder and path.is_file() else None

    def stream(self, prompt_tail: tuple[int, ...] = ()) -> DecodeStream:
        return DecodeStream(ids=list(prompt_tail), skip_special_tokens=True)

    def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)


class OutputProcessor:
    """The output state of one request: its decode stream, the text held back, the tokens counted.

    Text that might be the start of a stop string is held back until it is decided; a code point split over tokens
    is shown once whole.
    """

    def __init__(self, sampling: SamplingParams, eos_token_ids: frozenset[int], decoder: TextDecoder | None) -> None:
        self._sampling = sampling
        stop_ids = frozenset(sampling.stop_token_ids)
        self._stop_ids = stop_ids if sampling.ignore_eos else stop_ids | eos_token_ids
        self._decoder = decoder
        self._stream = decoder.stream() if decoder else None
        self._held = ""  # decoded but not yet shown
        self._undecoded: list[int] = []  # tokens whose text the stream still holds back
        self.num_tokens = 0

    @property
    def num_remaining(self) -> int:
        return self._sampling.max_tokens - self.num_tokens

    def replay(self, token_ids: tuple[int, ...]) -> None:
        """Bring the state to where it was after `token_ids`, which were emitted (and shown) elsewhere."""
        if token_ids:
            self.push(list(token_ids))

    def push(self, token_ids: list[int]) -> OutputDelta:
        """Take the tokens of one step in order; stop at the first token that ends the request."""
        kept: list[int] = []
        shown = ""
        for token in token_ids:
            kept.append(token)
            self.num_tokens += 1
            if token in self._stop_ids:
                return OutputDelta(tuple(kept), shown + self._flush(), "stop")
            text, stopped = self._add_text(token)
            shown += text
            if stopped:
                return OutputDelta(tuple(kept), shown, "stop")
            if self.num_tokens >= self._sampling.max_tokens:
                rest, stopped = self._flush_checked()
                return OutputDelta(tuple(kept), shown + rest, "stop" if stopped else "length")
        return OutputDelta(tuple(kept), shown, None)

    def _add_text(self, token: int) -> tuple[str, bool]:
        if self._stream is None or self._decoder is None:
            return "", False
        piece = self._stream.step(self._decoder.tokenizer, token)
        if piece is None:
            self._undecoded.append(token)
            return "", False
        self._undecoded.clear()
        return self._release(self._held + piece)

    def _release(self, text: str) -> tuple[str, bool]:
        """Split `text` into what may be shown now and what must wait; True if a stop string was found (text cut)."""
        found = [at for stop in self._sampling.stop if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = max((_overlap(text, stop) for stop in self._sampling.stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def _flush(self) -> str:
        """Everything held back, at the end of a request that no stop string ended."""
        return self._flush_checked()[0]

    def _flush_checked(self) -> tuple[str, bool]:
        tail = self._decoder.decode(self._undecoded) if self._decoder and self._undecoded else ""
        self._undecoded.clear()
        text, stopped = self._release(self._held + tail)
        text, self._held = text + self._held, ""
        return text, stopped


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that ends `text`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def read_eos_token_ids(folder: str) -> frozenset[int]:
    """EOS ids of a model folder: generation_config.json first, else config.json."""
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        if path.is_file():
            value = json.loads(path.read_text()).get("eos_token_id")
            if value is not None:
                return frozenset([value] if isinstance(value, int) else value)
    return frozenset()
