"""The command line: help everywhere, errors that name the culprit, and each command on the repository's tiny model."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from string import ascii_lowercase

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from dspark_ray.algorithm.cost_table import CostTable
from dspark_ray.cli import main
from dspark_ray.cli.arguments import build_parser, config_from
from dspark_ray.cli.serve import check_port_is_free, ready_message
from dspark_ray.config import AppConfig
from dspark_ray.errors import ConfigError

COMMANDS = ("demo-model", "generate", "profile", "serve", "check-exact")


def parse(*argv: str) -> Namespace:
    return build_parser().parse_args(argv)


@pytest.fixture(scope="module")
def spelling_target(fixtures_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with a tokenizer that spells: one token a lower-case letter."""
    folder = tmp_path_factory.mktemp("models") / "target"
    shutil.copytree(fixtures_dir / "target", folder)
    spelling = Tokenizer(
        WordLevel({letter: index for index, letter in enumerate(" ?" + ascii_lowercase)}, unk_token="?")
    )
    spelling.pre_tokenizer = Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=spelling).save_pretrained(folder)
    return folder


@pytest.fixture
def tiny(spelling_target: Path, fixtures_dir: Path) -> list[str]:
    """Options for the tiny target and its drafter."""
    options = ["--model", str(spelling_target), "--drafter-model", str(fixtures_dir / "draft_vanilla")]
    settings = ["engine.num_pages=64", "engine.max_num_seqs=4", "verification.cache_cost_table=false"]
    return [*options, "--threads", "1", "--device", "cpu", *(part for text in settings for part in ("--set", text))]


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in ("hello", "two words", "a third")))
    return path


@pytest.mark.parametrize("argv", [[], *([name] for name in COMMANDS)], ids=["dspark-ray", *COMMANDS])
def test_every_command_has_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([*argv, "--help"])
    assert exit_info.value.code == 0
    assert "usage: dspark-ray" in capsys.readouterr().out


def test_help_loads_neither_torch_nor_ray() -> None:
    code = "import sys; from dspark_ray.cli.arguments import build_parser; build_parser().format_help();"
    code += "sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_later_settings_win_over_earlier_ones(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("drafter: {kind: ngram, ngram_max: 6}\nverification: {policy: static, static_len: 2}\n")
    args = ["generate", "hi", "--config", str(file), "--set", "verification.static_len=5", "--policy", "threshold"]
    config = config_from(parse(*args))
    assert (config.drafter.kind, config.drafter.ngram_max) == ("ngram", 6)
    assert (config.verification.policy, config.verification.static_len) == ("threshold", 5)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["generate", "hi", "--set", "drafter.knid=ngram"], "drafter.knid"),
        (["generate", "hi", "--set", "engine.page_size=0"], "engine.page_size"),
        (["generate", "hi", "--set", "nonsense"], "nonsense"),
        (["generate", "hi", "--config", "/nowhere.yaml"], "/nowhere.yaml"),
        (["generate", "hi", "--model", "/no/such/model"], "/no/such/model"),
        (["generate", "hi", "--temperature", "-1"], "temperature"),
        (["serve", "--drafter", "draft_model"], "drafter.model"),
    ],
)
def test_a_mistake_is_named_and_ends_in_status_2(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("dspark-ray: error: ")
    assert named in error


def test_a_taken_port_is_refused_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="give another --host or --port"):
            check_port_is_free("127.0.0.1", taken.getsockname()[1])


def test_the_ready_message_holds_a_whole_curl_request() -> None:
    message = ready_message(AppConfig(), "0.0.0.0", 8123)
    assert "http://127.0.0.1:8123/v1/chat/completions" in message
    body = re.search(r"-d '(.*)'", message)
    assert body is not None
    assert json.loads(body.group(1))["model"] == "smollm2-135m-instruct"


def test_generate_compares_with_plain_decoding(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    sampling = ["--temperature", "1", "--seed", "3", "--max-tokens", "24"]
    assert main(["generate", "hello", *sampling, "--dtype", "float32", *tiny]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "output with and without drafts: the same tokens" in shown
    assert re.search(r"\d+ drafted, \d+ verified, \d+ accepted, \d+ emitted", shown)


def test_profile_writes_a_table_and_a_picture(tiny: list[str], tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    assert main(["profile", "--out", str(out), *tiny]) == 0
    table = CostTable.load(out)
    assert table.batch_tokens[0] == 1
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")


def test_check_exact_finds_every_kind_equal_on_the_tiny_model(
    tiny: list[str], prompt_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["check-exact", str(prompt_file), "--limit", "3", "--max-tokens", "12", "--policies", "static", "threshold"]
    assert main([*argv, "--concurrency", "1", "3", *tiny]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    engines, modes, levels, prompts = 5 * 2 + 1, 2, 2, 3
    assert (summary["runs"], summary["cases"]) == (engines * modes * levels, engines * modes * levels * prompts)
    assert summary["wrong"] == 0
    assert summary["equal"] + summary["ties"] == summary["cases"]


@pytest.mark.ray
def test_check_exact_over_ray_finds_the_same_tokens(tiny: list[str], prompt_file: Path) -> None:
    """In a process of its own: this one may hold another Ray session."""
    argv = ["check-exact", str(prompt_file), "--limit", "2", "--max-tokens", "8", "--concurrency", "2", "--ray"]
    command = [sys.executable, "-m", "dspark_ray.cli", *argv, "--drafters", "dspark", "--policies", "static", *tiny]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "RAY_AUTH_MODE": "disabled"})
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["executors"], summary["cases"], summary["wrong"]) == (["ray"], 4, 0)
