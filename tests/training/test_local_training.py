"""Training in one process, whole: tiny targets of two families, interruptions, caches, failures, served drafters."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from dspark_ray.errors import CheckpointError, ConfigError
from dspark_ray.models.checkpoints import load_draft_network
from dspark_ray.models.draft_config import checkpoint_kind
from dspark_ray.training.config import TrainingConfig
from dspark_ray.training.draft_trainer import STATE_FILE
from dspark_ray.training.pipeline import train_stage
from dspark_ray.training.run_folder import RunFolder
from dspark_ray.training.training_loop import TrainingRecord
from tests.chat_models import FAMILIES, save_chat_model
from tests.training.runs import greedy, run_with_corpus, tiny_config, train


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, folder in folders.items():
        save_chat_model(folder, family, num_layers=4)
    return folders


@pytest.fixture(scope="module")
def target(targets: dict[str, Path]) -> Path:
    return targets["qwen3"]


@pytest.fixture(scope="module")
def uninterrupted(target: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of 12 steps, four epochs of its corpus, without anything in between."""
    run = run_with_corpus(tmp_path_factory.mktemp("uninterrupted") / "drafter")
    train(tiny_config(target), run)
    return run


def weights(run: RunFolder) -> dict[str, torch.Tensor]:
    """The trained float32 weights, before they are rounded for serving."""
    state = torch.load(run.state / STATE_FILE, weights_only=True)
    return {**state["model"], "step": torch.tensor(state["step"])}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def interrupt_at(step: int, config: TrainingConfig, run: RunFolder) -> None:
    """Ctrl-C in the middle of training."""

    def record(each: TrainingRecord) -> None:
        if each.step >= step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_stage(config, run, record, local=True)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("architecture", ["dspark", "dflash", "autoregressive"])
def test_a_drafter_learns_is_served_and_changes_no_token(
    targets: dict[str, Path], tmp_path: Path, family: str, architecture: str
) -> None:
    config = tiny_config(targets[family], draft__architecture=architecture, optimisation__num_steps=16)
    run = run_with_corpus(tmp_path / "drafter")
    records = [each for each in train(config, run) if each.split == "validation"]
    assert [each.step for each in records] == [4, 8, 12, 16]
    assert records[-1].loss < records[0].loss
    assert (run.pictures / "training.png").read_bytes().startswith(b"\x89PNG")
    assert checkpoint_kind(run.drafter) == architecture
    plain, drafted = greedy(config, None), greedy(config, run.drafter)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    assert all(each.counts.admitted > 0 for each in drafted)


@pytest.mark.parametrize("interruptions", [(6,), (3, 9)], ids=["behind a checkpoint", "before the first and again"])
def test_an_interrupted_run_ends_with_the_very_weights_of_an_uninterrupted_one(
    target: Path, uninterrupted: RunFolder, tmp_path: Path, interruptions: tuple[int, ...]
) -> None:
    run, config = run_with_corpus(tmp_path / "drafter"), tiny_config(target)
    for step in interruptions:
        interrupt_at(step, config, run)
        assert not (run.drafter / "model.safetensors").exists(), "an unfinished drafter must not look finished"
    train(config, run)
    assert_same(weights(run), weights(uninterrupted))
    assert_same(load_file(run.drafter / "model.safetensors"), load_file(uninterrupted.drafter / "model.safetensors"))
    recorded = [(each.split, each.step, each.loss) for each in run.read_metrics()]
    assert recorded == [(each.split, each.step, each.loss) for each in uninterrupted.read_metrics()]


def test_a_finished_run_has_nothing_left_to_do(target: Path, tmp_path: Path) -> None:
    run, config = run_with_corpus(tmp_path / "drafter"), tiny_config(target, optimisation__num_steps=4)
    train(config, run)
    before = {path: path.read_bytes() for path in run.drafter.rglob("*") if path.is_file() and path.suffix != ".png"}
    assert train(config, run) == []
    after = {path: path.read_bytes() for path in run.drafter.rglob("*") if path.is_file() and path.suffix != ".png"}
    assert after == before
    train(tiny_config(target, optimisation__num_steps=6), run)
    assert weights(run)["step"] == 6


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_cached_features_train_the_weights_that_fresh_ones_do(
    target: Path, uninterrupted: RunFolder, tmp_path: Path, kind: str
) -> None:
    """Up to the last bits: features are computed once, in the batch of the first epoch."""
    run, config = run_with_corpus(tmp_path / "drafter"), tiny_config(target, trainer__feature_cache=kind)
    interrupt_at(6, config, run)
    kept = sorted((run.state / "features").glob("*.pt"))
    assert len(kept) == (16 if kind == "disk" else 0)
    stamps = [path.stat().st_mtime_ns for path in kept]
    train(config, run)
    assert [path.stat().st_mtime_ns for path in kept] == stamps, "nothing is computed twice"
    theirs = weights(uninterrupted)
    for name, ours in weights(run).items():
        assert_close(ours, theirs[name], atol=2e-4, rtol=2e-3)


@contextmanager
def no_file_larger_than(num_bytes: int) -> Iterator[None]:
    """The operating system refuses to write on, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("share", [0.3, 0.7, 0.999])
def test_a_disk_that_is_full_leaves_the_last_good_checkpoint(
    target: Path, uninterrupted: RunFolder, tmp_path: Path, share: float
) -> None:
    run, config = run_with_corpus(tmp_path / "drafter"), tiny_config(target)
    interrupt_at(6, config, run)
    good = (run.state / STATE_FILE).read_bytes()
    with no_file_larger_than(int(len(good) * share)), pytest.raises(OSError, match=r"trainer_state\.pt"):
        train(config, run)
    assert (run.state / STATE_FILE).read_bytes() == good
    assert sorted(path.name for path in run.state.iterdir()) == ["setup.json", STATE_FILE]
    train(config, run)
    assert_same(weights(run), weights(uninterrupted))


def test_a_finished_drafter_survives_a_save_that_fails(target: Path, tmp_path: Path) -> None:
    run = run_with_corpus(tmp_path / "drafter")
    config = tiny_config(target, optimisation__num_steps=2)
    train(config, run)
    good = (run.drafter / "model.safetensors").read_bytes()
    with no_file_larger_than(len(good) // 2), pytest.raises(CheckpointError, match=r"model\.safetensors cannot be wri"):
        train(config, run)
    assert (run.drafter / "model.safetensors").read_bytes() == good
    assert checkpoint_kind(run.drafter) == "dspark"
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"], "nothing half-written is left"


def test_the_state_of_another_drafter_is_refused(target: Path, uninterrupted: RunFolder, tmp_path: Path) -> None:
    run = run_with_corpus(tmp_path / "drafter")
    run.state.mkdir(parents=True)
    (run.state / STATE_FILE).write_bytes((uninterrupted.state / STATE_FILE).read_bytes())
    with pytest.raises(CheckpointError, match=r"trainer_state\.pt belongs to a drafter of another shape"):
        train(tiny_config(target, draft__markov_rank=8), run)


@pytest.mark.parametrize("damage", [b"", b"no checkpoint", "cut", "empty"], ids=["empty file", "text", "cut", "dict"])
def test_a_damaged_state_is_named(target: Path, uninterrupted: RunFolder, tmp_path: Path, damage: bytes | str) -> None:
    run = run_with_corpus(tmp_path / "drafter")
    run.state.mkdir(parents=True)
    path = run.state / STATE_FILE
    if damage == "cut":
        path.write_bytes((uninterrupted.state / STATE_FILE).read_bytes()[:-2000])
    elif damage == "empty":
        torch.save({}, path)
    elif isinstance(damage, bytes):
        path.write_bytes(damage)
    with pytest.raises(CheckpointError, match=r"trainer_state\.pt cannot be read as a trainer's state"):
        train(tiny_config(target), run)


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ({}, {"draft__block_size": 5}, "block_size"),
        ({}, {"draft__architecture": "dflash"}, "architectures"),
        ({}, {"draft__markov_head": "rnn"}, "markov_head_type"),
        ({"draft__draft_vocab_size": 64}, {}, "draft_vocab_size"),
        ({}, {"draft__draft_vocab_size": 64}, "draft_vocab_size"),
        ({"draft__mask_token_id": 3}, {"draft__mask_token_id": 4}, "mask_token_id"),
    ],
)
def test_a_folder_with_a_run_of_another_drafter_is_refused_by_field(
    target: Path, tmp_path: Path, first: dict[str, object], second: dict[str, object], named: str
) -> None:
    run = run_with_corpus(tmp_path / "drafter")
    train(tiny_config(target, **first, optimisation__num_steps=1), run)
    with pytest.raises(CheckpointError, match=f"holds a run of another drafter: .*{named}"):
        train(tiny_config(target, **second, optimisation__num_steps=1), run)


def test_a_folder_with_a_run_of_another_target_is_refused(targets: dict[str, Path], tmp_path: Path) -> None:
    run = run_with_corpus(tmp_path / "drafter")
    train(tiny_config(targets["qwen3"], optimisation__num_steps=1), run)
    with pytest.raises(CheckpointError, match="target"):
        train(tiny_config(targets["llama"], optimisation__num_steps=1), run)


def test_a_pruned_vocabulary_is_saved_in_the_speculators_layout_and_served(target: Path, tmp_path: Path) -> None:
    """The replies hold the first 40 bytes only: those are the draft vocabulary."""
    run = run_with_corpus(tmp_path / "drafter", num_tokens=40)
    config = tiny_config(target, draft__draft_vocab_size=32)
    train(config, run)
    tensors = load_file(run.drafter / "model.safetensors")
    mapped = torch.arange(32) + tensors["d2t"]
    assert tensors["t2d"].nonzero()[:, 0].tolist() == mapped.tolist()
    assert mapped.max() < 40
    assert {"embed_tokens.weight", "lm_head.weight"}.isdisjoint(tensors), "those are the target's"
    model = load_draft_network(str(run.drafter), str(target), dtype=torch.float32, device="cpu")
    assert model.lm_head.weight.shape[0] == 32
    plain, drafted = greedy(config, None), greedy(config, run.drafter)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    assert all(each.counts.admitted > 0 for each in drafted)


def test_training_goes_on_from_a_given_drafter(target: Path, uninterrupted: RunFolder, tmp_path: Path) -> None:
    run = run_with_corpus(tmp_path / "drafter")
    config = tiny_config(
        target,
        draft__initial_drafter=str(uninterrupted.drafter),
        optimisation__num_steps=1,
        optimisation__learning_rate=1e-9,
        optimisation__final_learning_rate=0.0,
    )
    train(config, run)
    before, after = load_file(uninterrupted.drafter / "model.safetensors"), load_file(run.drafter / "model.safetensors")
    for name, tensor in before.items():
        assert_close(after[name].float(), tensor.float(), atol=1e-6, rtol=1e-2)


def test_without_a_corpus_it_says_what_to_run_first(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run the corpus stage first"):
        train(tiny_config(target), RunFolder(tmp_path / "drafter"))
