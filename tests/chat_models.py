"""Tiny random chat models with a tokenizer of one token per byte and ChatML."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

SPECIAL_TOKENS = ["<|im_start|>", "<|im_end|>", "<|pad|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.content == 'refuse me' %}{{ raise_exception('I do not like it') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAX_MODEL_LEN = 512
FAMILIES = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}


def save_byte_tokenizer(folder: Path) -> int:
    """Write the tokenizer; returns its vocabulary size."""
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


def save_chat_model(folder: Path, family: str = "qwen3", num_layers: int = 2) -> None:
    """Write a random model of the family, seeded, over bytes."""
    vocab_size = save_byte_tokenizer(folder)
    torch.manual_seed(3)
    config_class, model_class = FAMILIES[family]
    config = config_class(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers,
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
    model_class(config).save_pretrained(folder)
