"""The real model with the shipped drafter: a slice of the exactness check, and that the drafts are worth something."""

import json
import re
from pathlib import Path

import pytest

from dspark_ray.cli import main
from dspark_ray.config import DEMO_MODEL
from dspark_ray.errors import ConfigError
from dspark_ray.models.resolve import resolve_model

LEAST_ACCEPTED = 1.3  # accepted length on this slice; a drafter whose features are off by one layer falls to 1.0


@pytest.fixture(scope="session")
def demo_model() -> Path:
    try:
        return resolve_model(DEMO_MODEL)
    except ConfigError as error:
        pytest.skip(f"the demo model cannot be had here: {error}")


@pytest.fixture(scope="session")
def prompt_files(shared_dir: Path) -> list[str]:
    return [str(path) for path in sorted((shared_dir / "prompts").glob("*.jsonl"))]


@pytest.mark.timeout(600)
def test_drafts_change_no_token_of_the_real_model(
    demo_model: Path, prompt_files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["engine.num_pages=400", "verification.cache_cost_table=false", "engine.max_num_seqs=8"]
    argv = ["check-exact", *prompt_files, "--limit", "1", "--max-tokens", "12", "--concurrency", "8"]
    argv += ["--dtype", "float32", "--device", "cpu", "--policies", "static", "--set", "verification.static_len=5"]
    argv += ["--drafters", "dspark", "ngram", "none"]
    assert main([*argv, *(part for text in settings for part in ("--set", text))]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["cases"] == 3 * 2 * len(prompt_files)
    assert summary["wrong"] == 0


def test_the_shipped_drafter_fits_the_demo_model(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "Write a Python function that adds two numbers.", "--temperature", "0", "--no-compare"]
    settings = ["engine.num_pages=200", "verification.policy=static"]
    assert main([*argv, "--max-tokens", "48", *(part for text in settings for part in ("--set", text))]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    row = re.search(r"with drafts \S+ \d+ \S+ [\d.]+ \S+ ([\d.]+)", shown)
    assert row is not None
    assert float(row.group(1)) > LEAST_ACCEPTED
