"""Any causal LM through paged attention equals transformers' own forward pass."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GemmaConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    T5Config,
)

from dspark_ray.errors import CheckpointError, ConfigError, UnsupportedModelError
from dspark_ray.models.attention import build_attention_batch
from dspark_ray.models.target import TargetModel, check_supported

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": None,
}
PAGE = 4


def tiny(config_class: type[PretrainedConfig], folder: Path, **extra: object) -> str:
    torch.manual_seed(0)
    config = config_class(**{**SIZES, **extra})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen2Config, Qwen3Config, MistralConfig, GemmaConfig])
def test_packed_steps_equal_the_models_own_forward(config_class: type[PretrainedConfig], tmp_path: Path) -> None:
    extra = {"sliding_window": None} if config_class is MistralConfig else {}
    folder = tiny(config_class, tmp_path, **extra)
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    target = TargetModel.load(folder, dtype=torch.float32)
    target.tap((-1, 0, 1))
    cache = target.allocate(32, PAGE)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 97, size=size) for size in (11, 19, 6)]
    table = np.array([[3, 9, 30, 0, 0], [1, 22, 5, 8, 14], [2, 7, 0, 0, 0]])
    cuts = [[7, 8, 11], [5, 18, 19], [0, 1, 6]]  # where each sequence's three steps end
    done = [0, 0, 0]
    for step in range(3):
        rows = [row for row in range(3) if cuts[row][step] > done[row]]
        lens = np.array([cuts[row][step] - done[row] for row in rows])
        starts = np.array([done[row] for row in rows])
        tokens = np.concatenate([sequences[row][done[row] : cuts[row][step]] for row in rows])
        positions = np.concatenate([np.arange(done[row], cuts[row][step]) for row in rows])
        batch = build_attention_batch(table[rows], PAGE, starts, lens, causal=True, device=target.device)
        out = target.forward(
            torch.from_numpy(tokens), torch.from_numpy(positions), cache, batch, torch.arange(len(tokens))
        )
        assert out.taps is not None
        for row, logits, taps in zip(rows, out.logits.split(lens.tolist()), out.taps.split(lens.tolist()), strict=True):
            with torch.no_grad():
                full = reference(torch.from_numpy(sequences[row])[None], output_hidden_states=True)
            span = slice(done[row], cuts[row][step])
            torch.testing.assert_close(logits, full.logits[0, span], atol=2e-4, rtol=2e-4)
            expected = torch.cat([full.hidden_states[layer][0, span] for layer in (0, 1, 2)], dim=-1)
            torch.testing.assert_close(taps, expected, atol=2e-4, rtol=2e-4)
            done[row] = cuts[row][step]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Gemma2Config(**SIZES), "soft-caps"),
        (MistralConfig(**SIZES, sliding_window=16), "sliding window"),
        (GptOssConfig(**SIZES, num_local_experts=2), "sliding_attention|sinks"),
        (T5Config(), "encoder-decoder"),
    ],
)
def test_unsupported_models_are_refused_with_the_reason(config: PretrainedConfig, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        check_supported(config)


def test_a_tensor_parallel_size_that_does_not_divide_the_heads_is_refused() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size 4 does not divide"):
        check_supported(LlamaConfig(**SIZES), tp_size=4)


def test_a_layer_id_out_of_range_is_named(tmp_path: Path) -> None:
    target = TargetModel.load(tiny(LlamaConfig, tmp_path), dtype=torch.float32)
    with pytest.raises(CheckpointError, match=r"contains 3, but the target has layers 0\.\.2"):
        target.tap((0, 3))


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        TargetModel.load(str(tmp_path), dtype=torch.float32)
