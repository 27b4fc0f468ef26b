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
from typing import Any

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
from tests.chat_models import save_chat_model

COMMANDS = ("demo-model", "generate", "profile", "serve", "check-exact", "train", "calibrate", "evaluate")


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
        (["train", "--out", "x", "--set", "optimisation.num_stepps=3"], "optimisation.num_stepps"),
        (["train", "--out", "x", "--set", "draft.block_size=0"], "draft.block_size"),
        (["evaluate", "--prompts", "missing.jsonl"], "missing.jsonl"),
        (["calibrate", "--drafter-model", "no/such/folder"], "no/such/folder"),
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


SMALL_RUN = {
    "corpus.prompts": ["{prompts}"],
    "corpus.synthesise": False,
    "corpus.min_reply_tokens": 1,
    "corpus.max_reply_tokens": 24,
    "corpus.validation_share": 0.5,
    "corpus.concurrency": 8,
    "corpus.num_threads": 1,
    "teacher.device": "cpu",
    "teacher.dtype": "float32",
    "draft.num_layers": 1,
    "draft.block_size": 3,
    "draft.markov_rank": 4,
    "optimisation.num_steps": 6,
    "optimisation.tokens_per_step": 160,
    "optimisation.anchors_per_sequence": 8,
    "optimisation.warmup_steps": 2,
    "optimisation.dtype": "float32",
    "optimisation.checkpoint_every_steps": 3,
    "optimisation.log_every_steps": 2,
    "trainer.num_threads": 1,
}


@pytest.fixture(scope="module")
def chat_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "chat"
    folder.mkdir()
    save_chat_model(folder)
    return folder


def write_chats(path: Path, count: int) -> str:
    path.write_text("".join(json.dumps({"turns": [f"question {i} of {path.stem}"]}) + "\n" for i in range(count)))
    return str(path)


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_train_makes_a_drafter_that_calibrate_and_evaluate_take(
    chat_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, held_out = tmp_path / "drafter", write_chats(tmp_path / "held.jsonl", 3)
    config = tmp_path / "small.yaml"
    config.write_text(json.dumps(SMALL_RUN).replace("{prompts}", write_chats(tmp_path / "prompts.jsonl", 60)))
    argv = ["train", "--target", str(chat_target), "--out", str(out), "--local", "--config", str(config)]
    assert main([*argv, "--held-out", held_out]) == 0
    summary = last_line(capsys)
    assert summary["corpus"]["sequences"]["train"] > 10
    assert summary["train"]["steps"] == summary["train"]["validation"]["step"] == 6
    assert summary["calibrate"].keys() >= {"modes"}
    assert {"mean_ece_greedy", "accepted_length_T0"} <= summary["goals"].keys()
    assert {path.name for path in out.iterdir()} >= {"config.json", "model.safetensors", "calibration.json"}

    common = ["--model", str(chat_target), "--threads", "1", "--device", "cpu", "--dtype", "float32"]
    fresh = tmp_path / "fresh.json"
    assert main(["calibrate", "--drafter-model", str(out), "--max-tokens", "24", "--out", str(fresh), *common]) == 0
    assert last_line(capsys)["modes"].keys() == {"greedy", "rejection", "coupled"}
    assert (tmp_path / "fresh.png").read_bytes().startswith(b"\x89PNG")

    pictures = tmp_path / "pictures"
    drafters = ["--drafters", f"dspark={out}", "ngram", "none", "--max-tokens", "16", "--temperatures", "0"]
    assert main(["evaluate", "--prompts", held_out, "--out", str(pictures), *drafters, *common]) == 0
    judged = last_line(capsys)
    assert judged["drafters"].keys() == {"dspark", "ngram", "none"}
    assert judged["drafters"]["none"]["T=0"]["mean_accepted_length"] == 1.0
    assert len(list(pictures.glob("*.png"))) == 2


@pytest.mark.ray
def test_check_exact_over_ray_finds_the_same_tokens(tiny: list[str], prompt_file: Path) -> None:
    """In a process of its own: this one may hold another Ray session."""
    argv = ["check-exact", str(prompt_file), "--limit", "2", "--max-tokens", "8", "--concurrency", "2", "--ray"]
    command = [sys.executable, "-m", "dspark_ray.cli", *argv, "--drafters", "dspark", "--policies", "static", *tiny]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "RAY_AUTH_MODE": "disabled"})
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["executors"], summary["cases"], summary["wrong"]) == (["ray"], 4, 0)
