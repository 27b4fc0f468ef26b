"""Text and chat messages to token ids, without torch: the tokenizer comes as files from whoever loaded the model.

Knows nothing of requests or HTTP. Sending the files keeps the ingress free of shared disks and downloads, and its
tokens equal to the engine's.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from dspark_ray.errors import RequestError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
LONG_TEXT = 4096  # characters from which tokenising would hold up the event loop noticeably


def read_tokenizer_files(folder: Path) -> dict[str, bytes]:
    """The files of a model folder that a tokenizer is made of; empty where it has no tokenizer.json."""
    if not (folder / "tokenizer.json").is_file():
        return {}
    return {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}


class PromptEncoder:
    """Tokenises prompts and renders the chat template of one model."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def from_files(cls, files: dict[str, bytes]) -> "PromptEncoder | None":
        """None where there are no files: such a model is served by token ids alone."""
        if not files:
            return None
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                Path(folder, name).write_bytes(content)
            return cls(PreTrainedTokenizerFast.from_pretrained(folder))

    async def encode_text(self, text: str) -> list[int]:
        """Token ids of a completion prompt, with the special tokens that the tokenizer puts around it."""
        if len(text) < LONG_TEXT:
            return self._encode(text, add_special_tokens=True)
        return await asyncio.to_thread(self._encode, text, add_special_tokens=True)

    async def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a rendered chat, ending where the assistant is to speak.

        Raises RequestError where the model has no chat template or its template refuses the messages.
        """
        text = self._render(messages)
        if len(text) < LONG_TEXT:
            return self._encode(text, add_special_tokens=False)
        return await asyncio.to_thread(self._encode, text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(token_ids))
        assert isinstance(text, str)
        return text

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]

    def _render(self, messages: Sequence[dict[str, str]]) -> str:
        if self._tokenizer.chat_template is None:
            raise RequestError("this model has no chat template: use /v1/completions", param="messages")
        try:
            text = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        # A template is a program that comes with the model: whatever it raises, it is these messages it refuses.
        except Exception as error:
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from error
        assert isinstance(text, str)
        return text
