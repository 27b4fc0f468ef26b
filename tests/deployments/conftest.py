"""A tiny chat model with a byte tokenizer, and the API over a real engine on it, all in this process."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3Config, Qwen3ForCausalLM

from dspark_ray.config import AppConfig

SPECIAL_TOKENS = ["<|im_start|>", "<|im_end|>", "<|pad|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.content == 'refuse me' %}{{ raise_exception('I do not like it') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAX_MODEL_LEN = 512


def save_byte_tokenizer(folder: Path) -> int:
    """Write a tokenizer of one token per byte and ChatML; returns its vocabulary size."""
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {token: len(vocab) + index for index, token in enumerate(SPECIAL_TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(vocab)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Qwen3 over bytes with a chat template."""
    folder = tmp_path_factory.mktemp("tiny-chat")
    vocab_size = save_byte_tokenizer(folder)
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=False,
        initializer_range=0.4,
        eos_token_id=vocab_size - 2,
        bos_token_id=None,
        pad_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def app_config(chat_model: Path) -> AppConfig:
    """The tiny chat model as its own draft model: drafts are often accepted."""
    return AppConfig.model_validate(
        {
            "target": {
                "model": str(chat_model),
                "served_model_name": "tiny",
                "dtype": "float32",
                "device": "cpu",
                "num_threads": 1,
            },
            "drafter": {"kind": "draft_model", "model": str(chat_model), "dtype": "float32", "device": "cpu"},
            "verification": {"policy": "static", "static_len": 3},
            "engine": {"page_size": 4, "num_pages": 1000, "max_num_seqs": 16, "max_queued": 32},
        }
    )
