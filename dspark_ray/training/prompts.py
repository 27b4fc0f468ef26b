"""Where prompts come from: rows of JSONL files, or user turns that the target writes itself. Counts what it leaves out.

Knows the chat template, no model. A prompt is known by its fingerprint: none is used twice, none that is held out.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark_ray.errors import ConfigError
from dspark_ray.offline import chat_prompt

_MARK = "\x00"


def read_prompt_rows(paths: Iterable[str], skipped: Counter[str], field: str = "corpus.prompts") -> Iterator[str]:
    """The first user turn of each row of {"turns": [...]} or {"messages": [...]}.

    Rows that are neither are counted in `skipped` by reason. Raises ConfigError for a file that cannot be read.
    """
    for path in paths:
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{field}: {path} cannot be read: {error}") from error
        for line in lines:
            text = _first_user_turn(line)
            if isinstance(text, str) and text.strip():
                yield text
            else:
                skipped["empty row" if text is not None else "not a chat row"] += 1


def _first_user_turn(line: str) -> str | None:
    """The text ('' where it is empty); None where the row is not a chat."""
    if not line.strip():
        return ""
    try:
        row = json.loads(line)
        if "turns" in row:
            turns = row["turns"]
        else:
            turns = [message["content"] for message in row["messages"] if message["role"] == "user"]
    except (ValueError, KeyError, TypeError):
        return None
    if not isinstance(turns, list):
        return None
    return turns[0] if turns and isinstance(turns[0], str) else ("" if not turns else None)


class ChatTemplate:
    """Prompts of a model: of a given user turn, and the beginning after which the model writes a user turn itself."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def prompt(self, text: str) -> tuple[int, ...]:
        return chat_prompt(self._tokenizer, text)

    def user_header(self, opening: str) -> tuple[int, ...]:
        """Everything up to the user's text and its first words. Without a chat template: the words alone, or BOS.

        Raises ConfigError where neither gives the model anything to go on from.
        """
        tokenizer = self._tokenizer
        if tokenizer.chat_template:
            whole = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False)
            header = whole.split(_MARK)[0] + opening
            ids = tokenizer.encode(header, add_special_tokens=False)
        else:
            ids = tokenizer.encode(opening) or [i for i in (tokenizer.bos_token_id,) if i is not None]
        if not ids:
            raise ConfigError("the tokenizer has neither a chat template nor a bos token: give corpus.prompts")
        return tuple(ids)

    def text(self, token_ids: tuple[int, ...], *, strip: bool = True) -> str:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        assert isinstance(text, str)
        return text.strip() if strip else text

    def fingerprint(self, prompt: tuple[int, ...]) -> int:
        """64 bits of a prompt's text without regard to case and white space."""
        words = " ".join(self.text(prompt).lower().split())
        return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest())


@dataclass
class PromptFilter:
    """Which prompts may be used, by fingerprint. `seen` grows with each that was let through."""

    held_out: frozenset[int]
    seen: set[int]
    max_tokens: int
    skipped: Counter[str]

    def admits(self, prompt: tuple[int, ...], fingerprint: int) -> bool:
        if len(prompt) > self.max_tokens:
            self.skipped["prompt too long"] += 1
        elif fingerprint in self.held_out:
            self.skipped["held out"] += 1
        elif fingerprint in self.seen:
            self.skipped["duplicate prompt"] += 1
        else:
            self.seen.add(fingerprint)
            return True
        return False


def held_out_fingerprints(paths: Iterable[str], template: ChatTemplate) -> frozenset[int]:
    """Of the first user turn of every row in the files, which must never be trained on."""
    rows = read_prompt_rows(paths, Counter(), "corpus.held_out")
    return frozenset(template.fingerprint(template.prompt(text)) for text in rows)


def is_validation(fingerprint: int, share: float) -> bool:
    """By the prompt alone, so that it stays in its split whatever else is in a corpus."""
    return fingerprint % 10_000 < share * 10_000
