"""Profiling leaves nothing behind."""

from collections.abc import Callable

import torch

from dspark_ray.config import AppConfig
from dspark_ray.engine.drafters.dspark import DSparkDrafter
from dspark_ray.engine.drafters.factory import build_drafter
from dspark_ray.engine.profiler import profile_drafter


def test_profiling_a_drafter_frees_the_context_it_used(make_config: Callable[..., AppConfig]) -> None:
    drafter = build_drafter(make_config(max_num_seqs=4))
    assert isinstance(drafter, DSparkDrafter)
    hidden_size = drafter._model.config.hidden_size
    assert profile_drafter(drafter, hidden_size, torch.float32, repeats=1) > 0
    assert "profile" not in drafter._pool
