"""Draft checkpoints: three dialects, embeddings of the target, pruned vocabularies, errors that name the culprit."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from dspark_ray.errors import CheckpointError, ConfigError, UnsupportedModelError
from dspark_ray.models.checkpoints import load_draft_model, load_feature_projection, read_target_embeddings
from dspark_ray.models.draft_config import parse_draft_config, read_draft_config
from dspark_ray.models.draft_model import DSparkDraftModel

Edit = Callable[[Path, dict[str, Any]], Path]


@pytest.fixture
def edited(fixtures_dir: Path, tmp_path: Path) -> Edit:
    """A copy of a fixture folder with changed config fields (None removes one)."""

    def copy(source: Path, changes: dict[str, Any]) -> Path:
        folder = tmp_path / source.name
        shutil.copytree(source, folder)
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        return folder

    return copy


def _load(folder: Path, target: Path | None = None) -> DSparkDraftModel:
    return load_draft_model(str(folder), target and str(target), dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": None}, "mask_token_id must be an integer"),
        ({"mask_token_id": 64}, "mask_token_id is 64, but vocab_size is 64"),
        ({"target_layer_ids": [2, 0]}, "target_layer_ids must be strictly increasing"),
        ({"target_layer_ids": [1, 1]}, "target_layer_ids must be strictly increasing"),
        ({"target_layer_ids": []}, "target_layer_ids must be a list"),
        ({"target_layer_ids": [0, 3]}, "target_layer_ids contains 3"),  # the last of 4 layers
        ({"target_layer_ids": [-2, 0]}, "target_layer_ids contains -2"),
        ({"markov_head_type": "lstm"}, "markov_head_type is 'lstm'"),
        ({"markov_rank": 0}, "confidence_head_with_markov is true but markov_rank is 0"),
        ({"block_size": 0}, "block_size must be an integer of at least 1"),
        ({"hidden_size": "wide"}, "hidden_size must be an integer"),
        ({"draft_vocab_size": 65}, "draft_vocab_size is 65"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ],
)
def test_a_bad_config_names_its_field(fixtures_dir: Path, edited: Edit, changes: dict[str, Any], message: str) -> None:
    folder = edited(fixtures_dir / "draft_vanilla", changes)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read_draft_config(str(folder))


@pytest.mark.parametrize("changes", [{"model_type": "gemma4_text"}, {"layer_types": ["sliding_attention"] * 2}])
def test_unsupported_backbones_are_refused_by_name(fixtures_dir: Path, edited: Edit, changes: dict[str, Any]) -> None:
    folder = edited(fixtures_dir / "draft_vanilla", changes)
    with pytest.raises(UnsupportedModelError, match=r"gemma4_text|sliding_attention"):
        read_draft_config(str(folder))


def test_num_draft_tokens_may_be_smaller_than_the_block_but_never_larger(fixtures_dir: Path) -> None:
    config = read_draft_config(str(fixtures_dir / "draft_vanilla"))
    assert [config.resolve_num_draft_tokens(requested) for requested in (None, 5, 1)] == [5, 5, 1]
    with pytest.raises(ConfigError, match=r"num_draft_tokens is 6.*block_size 5"):
        config.resolve_num_draft_tokens(6)
    dflash = read_draft_config(str(fixtures_dir / "draft_dflash"))
    assert dflash.resolve_num_draft_tokens(None) == 4
    with pytest.raises(ConfigError, match="predicts 4 tokens"):
        dflash.resolve_num_draft_tokens(5)


@pytest.mark.parametrize(("rank", "confidence", "with_markov"), [(4, True, True), (4, True, False), (4, False, False),
                                                                 (0, True, False), (0, False, False)])  # fmt: skip
def test_every_combination_of_head_flags_loads(
    fixtures_dir: Path, edited: Edit, rank: int, confidence: bool, with_markov: bool
) -> None:
    folder = edited(
        fixtures_dir / "draft_vanilla",
        {"markov_rank": rank, "enable_confidence_head": confidence, "confidence_head_with_markov": with_markov},
    )
    tensors = load_file(folder / "model.safetensors")
    tensors["confidence_head.proj.weight"] = tensors["confidence_head.proj.weight"][
        :, : 16 + rank * with_markov
    ].clone()
    dropped = ["markov_head."] * (rank == 0) + ["confidence_head."] * (not confidence)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(tuple(dropped))}
    save_file(kept, folder / "model.safetensors")
    model = _load(folder)
    assert (model.markov_head is not None) == (rank > 0)
    assert (model.confidence_head is not None) == confidence


def test_missing_unexpected_and_misshapen_tensors_are_named(fixtures_dir: Path, edited: Edit) -> None:
    folder = edited(fixtures_dir / "draft_vanilla", {})
    tensors = load_file(folder / "model.safetensors")
    norm = tensors.pop("norm.weight")
    save_file(tensors | {"extra.weight": norm}, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"missing tensors \['norm.weight'\], unexpected tensors \['extra.weight'\]"
    ):
        _load(folder)
    save_file(tensors | {"norm.weight": norm[:-1].clone()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"norm.weight is \[15\], expected \[16\]"):
        _load(folder)


def test_a_folder_without_weights_or_with_garbage_says_so(fixtures_dir: Path, edited: Edit, tmp_path: Path) -> None:
    folder = edited(fixtures_dir / "draft_vanilla", {})
    (folder / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        _load(folder)
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")  # pickles are never read
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor"):
        _load(folder)
    with pytest.raises(CheckpointError, match="does not exist"):
        _load(tmp_path / "nowhere")


def test_absent_embeddings_are_the_targets(fixtures_dir: Path) -> None:
    target = load_file(fixtures_dir / "target" / "model.safetensors")
    model = _load(fixtures_dir / "draft_gated", fixtures_dir / "target")
    assert torch.equal(model.embed_tokens.weight, target["model.embed_tokens.weight"])
    assert torch.equal(model.lm_head.weight, target["lm_head.weight"])
    with pytest.raises(CheckpointError, match=r"leaves out .*embed_tokens.weight.*give the target's folder"):
        _load(fixtures_dir / "draft_gated")


def test_target_embeddings_are_read_from_shards_and_may_be_tied(fixtures_dir: Path, edited: Edit) -> None:
    folder = edited(fixtures_dir / "target", {"tie_word_embeddings": True})
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    del tensors["lm_head.weight"]
    embedding = tensors.pop("model.embed_tokens.weight")
    save_file({"model.embed_tokens.weight": embedding}, folder / "a.safetensors")
    weight_map = {"model.embed_tokens.weight": "a.safetensors"} | dict.fromkeys(tensors, "never_opened.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    shared = read_target_embeddings(str(folder))
    assert torch.equal(shared.embed_tokens, embedding)
    assert shared.lm_head is shared.embed_tokens
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="tie_word_embeddings is false"):
        read_target_embeddings(str(folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"num_hidden_layers": 5}, "num_target_layers is 4"), ({"vocab_size": 65}, "vocab_size 64"),
     ({"hidden_size": 32}, "hidden_size 16")],
)  # fmt: skip
def test_a_drafter_for_another_target_is_refused(
    fixtures_dir: Path, edited: Edit, changes: dict[str, Any], message: str
) -> None:
    target = edited(fixtures_dir / "target", changes)
    with pytest.raises(CheckpointError, match=message):
        _load(fixtures_dir / "draft_vanilla", target)


def _prune(folder: Path, kept: torch.Tensor) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        tensors[name] = tensors[name][kept].clone()
    tensors["d2t"] = kept - torch.arange(len(kept))
    save_file(tensors, folder / "model.safetensors")


def test_a_pruned_vocabulary_maps_to_target_ids_by_offsets(fixtures_dir: Path, edited: Edit) -> None:
    kept = torch.tensor([1, 2, 5, 17, 40, 63])
    folder = edited(fixtures_dir / "draft_vanilla", {"draft_vocab_size": len(kept)})
    _prune(folder, kept)
    pruned, full = _load(folder), _load(fixtures_dir / "draft_vanilla")
    hidden = torch.randn(2, 3, 16)
    assert_close(pruned.base_logits(hidden), full.base_logits(hidden)[..., kept])
    assert pruned.draft_to_target is not None
    assert pruned.draft_to_target.tolist() == kept.tolist()
    assert pruned.markov_head is not None
    assert pruned.markov_head(torch.tensor([[63]]), hidden[:1, :1]).shape == (1, 1, len(kept))


def test_a_pruned_vocabulary_with_a_bad_map_is_refused(fixtures_dir: Path, edited: Edit) -> None:
    folder = edited(fixtures_dir / "draft_vanilla", {"draft_vocab_size": 3})
    _prune(folder, torch.tensor([1, 2, 2]))
    with pytest.raises(CheckpointError, match="d2t must map each draft id to its own target id"):
        _load(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["d2t"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="needs the tensor d2t"):
        _load(folder)


def test_the_speculators_dialect_is_read_with_its_own_layer_numbering(fixtures_dir: Path) -> None:
    flat = json.loads((fixtures_dir / "draft_vanilla" / "config.json").read_text())
    inner_fields = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
                    "num_key_value_heads", "head_dim", "model_type", "rope_parameters", "rms_norm_eps")  # fmt: skip
    speculators = {
        "speculators_model_type": "dspark",
        "architectures": ["DSparkSpeculator"],
        "transformer_layer_config": {field: flat[field] for field in inner_fields},
        "aux_hidden_state_layer_ids": [1, 3],  # hidden states, 0 is the embedding output: layers 0 and 2
        "block_size": 5,
        "mask_token_id": 63,
        "markov_rank": 4,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    config = parse_draft_config(speculators)
    assert config.target_layer_ids == (0, 2)
    assert config.sample_from_anchor
    assert config.markov_head_type == "vanilla"
    dflash = parse_draft_config(speculators | {"speculators_model_type": "dflash", "architectures": ["DFlash"],
                                               "markov_rank": 0, "confidence_head_with_markov": False})  # fmt: skip
    assert not dflash.sample_from_anchor


def test_the_projection_of_a_checkpoint_without_fc_is_refused(fixtures_dir: Path, edited: Edit) -> None:
    folder = edited(fixtures_dir / "draft_vanilla", {})
    tensors = load_file(folder / "model.safetensors")
    del tensors["fc.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing tensors \['fc.weight'\]"):
        load_feature_projection(str(folder), dtype=torch.float32, device="cpu")


def test_the_first_real_drafter_loads_without_its_own_embeddings(shared_dir: Path) -> None:
    config = read_draft_config(str(shared_dir / "drafters" / "smollm2-135m-dspark-first"))
    assert (config.num_layers, config.block_size, config.target_layer_ids) == (2, 7, (1, 8, 15, 22, 28))
