"""Names become folders, or errors that say what to do."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from dspark_ray.config import DEMO_DRAFTER, DEMO_MODEL, DrafterConfig
from dspark_ray.errors import ConfigError
from dspark_ray.models.demo import MANIFEST, sha256_of, verify_manifest
from dspark_ray.models.resolve import cache_folder, resolve_drafter, resolve_model


def test_a_folder_resolves_to_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()


def test_a_folder_without_config_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))


def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.*does not exist"):
        resolve_model(str(tmp_path / "nowhere"))


def test_a_name_the_hub_refuses_is_a_config_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match=r"'no//such//id'.*Hugging Face Hub"):
        resolve_model("no//such//id")


def test_the_cache_follows_xdg_cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "dspark_ray"


def test_a_damaged_file_is_found_by_its_checksum(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    (tmp_path / MANIFEST).write_text(json.dumps({"files": {weights.name: sha256_of(weights)}}))
    verify_manifest(tmp_path)
    weights.write_bytes(b"weightz")
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged"):
        verify_manifest(tmp_path)
    weights.unlink()
    with pytest.raises(ConfigError, match="no such file"):
        verify_manifest(tmp_path)


@pytest.mark.parametrize("kind", ["ngram", "none"])
def test_kinds_without_a_checkpoint_resolve_to_none(kind: str) -> None:
    assert resolve_drafter(DrafterConfig.model_validate({"kind": kind}), "some/model") is None


@pytest.mark.parametrize("model", [None, DEMO_DRAFTER])
def test_the_shipped_drafter_serves_the_demo(model: str | None) -> None:
    folder = resolve_drafter(DrafterConfig(model=model), DEMO_MODEL)
    assert folder is not None
    config = json.loads((folder / "config.json").read_text())
    assert (config["block_size"], config["markov_head_type"]) == (7, "vanilla")
    with safe_open(folder / "model.safetensors", framework="np") as weights:
        assert "fc.weight" in weights.keys()  # noqa: SIM118


def test_another_target_needs_its_own_drafter() -> None:
    with pytest.raises(ConfigError, match=r"'org/big'.*set drafter\.model"):
        resolve_drafter(DrafterConfig(), "org/big")


def test_a_draft_model_must_be_named() -> None:
    with pytest.raises(ConfigError, match=r"drafter\.model is not set"):
        resolve_drafter(DrafterConfig(kind="draft_model"), DEMO_MODEL)


def test_resolving_imports_neither_torch_nor_ray() -> None:
    code = "import sys, dspark_ray.models.resolve; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_demo_model_is_a_chat_model_with_checked_files() -> None:
    folder = resolve_model(DEMO_MODEL)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.slow
def test_two_processes_convert_once(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from dspark_ray.models.demo import ensure_demo_model;"
        "print((ensure_demo_model(Path(sys.argv[1])) / 'model.safetensors').stat().st_ino)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(lambda _: subprocess.run(command, capture_output=True, text=True, check=True), range(2)))
    assert runs[0].stdout == runs[1].stdout
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [DEMO_MODEL]
    assert sum("convert" in run.stderr for run in runs) == 1
