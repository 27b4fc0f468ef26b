"""A tiny chat model with a byte tokenizer, and the API over a real engine on it, all in this process."""

from pathlib import Path

import pytest

from dspark_ray.config import AppConfig
from tests.chat_models import save_chat_model


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Qwen3 over bytes with a chat template."""
    folder = tmp_path_factory.mktemp("tiny-chat")
    save_chat_model(folder)
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
