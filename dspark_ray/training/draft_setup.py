"""What a run decides once and keeps: the drafter's config.json, its tokens, whose weights it starts from.

Kept in the run's folder, so that a resumed run goes on with the same whatever has become of the corpus.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dspark_ray.errors import CheckpointError
from dspark_ray.models.autoregressive_draft import DraftNetwork
from dspark_ray.models.checkpoints import load_draft_network
from dspark_ray.models.draft_config import read_json
from dspark_ray.models.files import replace_text
from dspark_ray.models.resolve import resolve_model
from dspark_ray.training.config import TrainingConfig
from dspark_ray.training.draft_vocabulary import most_frequent_tokens, rarest_token, reply_token_counts
from dspark_ray.training.initialisation import draft_config_json, new_draft_model
from dspark_ray.training.sequences import TrainingSequence

SETUP_FILE = "setup.json"


@dataclass(frozen=True, slots=True)
class DraftSetup:
    """Enough to build the untrained drafter anywhere."""

    target_folder: str
    config_json: dict[str, Any]
    draft_token_ids: list[int] | None  # target ids of a pruned vocabulary, increasing
    initial_drafter: str | None
    seed: int

    def build(self) -> DraftNetwork:
        """The float32 model as it is before the first step."""
        if self.initial_drafter is None:
            return new_draft_model(Path(self.target_folder), self.config_json, self.draft_token_ids, self.seed)
        return load_draft_network(
            str(resolve_model(self.initial_drafter)), self.target_folder, dtype=torch.float32, device="cpu"
        )

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        ids = self.config_json.get("target_layer_ids") or self.config_json["dflash_config"]["target_layer_ids"]
        return tuple(ids)


def prepare_setup(config: TrainingConfig, sequences: Sequence[TrainingSequence], folder: Path) -> DraftSetup:
    """The setup kept in `folder`, or a new one from the corpus.

    Raises CheckpointError where the kept one is of another target or shape than `config` asks for.
    """
    target_folder = resolve_model(config.teacher.model)
    wanted = _new_setup(config, sequences, target_folder)
    path = folder / SETUP_FILE
    if not path.is_file():
        replace_text(path, json.dumps(asdict(wanted), indent=1) + "\n")
        return wanted
    kept = DraftSetup(**json.loads(path.read_text(encoding="utf-8")))
    chosen_by_corpus = {"mask_token_id": kept.config_json.get("mask_token_id")}
    if config.draft.mask_token_id is None:
        wanted.config_json.update(chosen_by_corpus)
    keys = sorted(wanted.config_json.keys() | kept.config_json.keys())
    different = [key for key in keys if kept.config_json.get(key) != wanted.config_json.get(key)]
    if kept.target_folder != wanted.target_folder:
        different.append("target")
    if different:
        raise CheckpointError(
            f"{folder} holds a run of another drafter: {', '.join(different)} differ; give another output folder, or "
            "the same configuration to go on"
        )
    return kept


def _new_setup(config: TrainingConfig, sequences: Sequence[TrainingSequence], target_folder: Path) -> DraftSetup:
    shape, seed = config.draft, config.optimisation.seed
    if shape.initial_drafter is not None:
        raw = read_json(resolve_model(shape.initial_drafter) / "config.json")
        return DraftSetup(str(target_folder), raw, None, shape.initial_drafter, seed)
    target = read_json(target_folder / "config.json")
    counts = reply_token_counts(sequences, int((target.get("text_config") or target)["vocab_size"]))
    mask = rarest_token(counts) if shape.mask_token_id is None else shape.mask_token_id
    tokens = most_frequent_tokens(counts, shape.draft_vocab_size)
    return DraftSetup(str(target_folder), draft_config_json(target_folder, shape, mask), tokens, None, seed)
