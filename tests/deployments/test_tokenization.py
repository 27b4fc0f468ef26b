"""Prompts become the tokens that transformers makes of them, in a process that never imports torch."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from deployments.tokenization import LONG_TEXT, PromptEncoder, read_tokenizer_files
from dspark_ray.errors import RequestError

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hé 🙂"}]


@pytest.fixture(scope="module")
def encoder(chat_model: Path) -> PromptEncoder:
    encoder = PromptEncoder.from_files(read_tokenizer_files(chat_model))
    assert encoder is not None
    return encoder


def test_chat_and_text_equal_what_transformers_makes_of_them(encoder: PromptEncoder, chat_model: Path) -> None:
    reference = AutoTokenizer.from_pretrained(chat_model)
    expected = reference.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert asyncio.run(encoder.encode_chat(MESSAGES)) == expected
    assert asyncio.run(encoder.encode_text("hé 🙂")) == reference("hé 🙂")["input_ids"]


def test_long_text_takes_the_thread_and_gives_the_same_tokens(encoder: PromptEncoder) -> None:
    text = "abc " * LONG_TEXT
    assert asyncio.run(encoder.encode_text(text)) == asyncio.run(encoder.encode_text("abc ")) * LONG_TEXT


def test_decoding_gives_the_text_back(encoder: PromptEncoder) -> None:
    assert encoder.decode(asyncio.run(encoder.encode_text("hé 🙂"))) == "hé 🙂"


def test_a_template_that_refuses_the_messages_is_the_clients_error(encoder: PromptEncoder) -> None:
    with pytest.raises(RequestError, match="I do not like it") as caught:
        asyncio.run(encoder.encode_chat([{"role": "user", "content": "refuse me"}]))
    assert caught.value.param == "messages"


def test_a_model_without_a_chat_template_says_so(chat_model: Path) -> None:
    files = read_tokenizer_files(chat_model)
    files["tokenizer_config.json"] = b'{"tokenizer_class": "PreTrainedTokenizerFast"}'
    files.pop("chat_template.jinja", None)
    encoder = PromptEncoder.from_files(files)
    assert encoder is not None
    with pytest.raises(RequestError, match="no chat template"):
        asyncio.run(encoder.encode_chat(MESSAGES))


def test_a_folder_without_a_tokenizer_gives_no_encoder(tmp_path: Path) -> None:
    assert read_tokenizer_files(tmp_path) == {}
    assert PromptEncoder.from_files({}) is None


def test_tokenising_never_imports_torch(chat_model: Path) -> None:
    code = f"""
import asyncio, sys
from pathlib import Path
import deployments.ingress
from deployments.tokenization import PromptEncoder, read_tokenizer_files
encoder = PromptEncoder.from_files(read_tokenizer_files(Path({str(chat_model)!r})))
asyncio.run(encoder.encode_chat([{{"role": "user", "content": "hi"}}]))
asyncio.run(encoder.encode_text("hi"))
sys.exit("torch" in sys.modules)
"""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
