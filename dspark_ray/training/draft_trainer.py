"""Trains one drafter: optimiser, schedule, checkpoints. A plain class: Ray Train's workers and tests drive it alike.

Knows neither Ray nor where batches come from. With torch.distributed initialised, gradients are averaged over it.
"""

import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dspark_ray.errors import CheckpointError
from dspark_ray.models.autoregressive_draft import DraftNetwork
from dspark_ray.training.anchors import sample_anchors
from dspark_ray.training.batches import SupervisedBatch
from dspark_ray.training.config import OptimisationConfig
from dspark_ray.training.losses import LossWeights
from dspark_ray.training.objective import DraftVocabulary, Objective, ObjectiveSettings, draft_objective

STATE_FILE = "trainer_state.pt"
DEFAULT_DECAY_SHARE = 4 / 7  # DeepSpec: gamma 4 for blocks of 7
FROZEN = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What one step tells the log; acceptance is teacher-forced (equation 8)."""

    step: int
    loss: float
    cross_entropy: float
    total_variation: float
    confidence: float
    acceptance: np.ndarray  # [K] float64, mean of c* at each draft position
    accepted_length: float  # 1 + expected accepted drafts of whole blocks (bonus included)
    num_positions: int
    num_tokens: int


class DraftTrainer:
    """Steps a model over supervised batches. `step` counts finished steps."""

    def __init__(self, model: DraftNetwork, config: OptimisationConfig, device: torch.device, worker: int = 0) -> None:
        self.model = model.to(device).train()
        self.config, self.device, self.worker, self.step = config, device, worker, 0
        self._dtype = compute_dtype(config.dtype, device)
        trainable = [parameter for name, parameter in model.named_parameters() if name not in FROZEN]
        for parameter in trainable:
            parameter.requires_grad_(True)
        self._trainable = trainable
        self._share_start()
        self._optimizer = torch.optim.AdamW(
            trainable, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True
        )
        decay = config.decay or DEFAULT_DECAY_SHARE * model.config.block_size
        weights = LossWeights(config.cross_entropy_weight, config.total_variation_weight, config.confidence_weight)
        self._settings = ObjectiveSettings(weights, decay, config.head_chunk)
        self._vocabulary = draft_vocabulary(model, self._dtype)

    def train_step(self, batch: SupervisedBatch) -> StepMetrics:
        """One optimiser step over random anchors of the batch."""
        objective = self._objective(batch, np.random.default_rng((self.config.seed, self.worker, self.step)))
        objective.loss.backward()
        self._average_gradients()
        torch.nn.utils.clip_grad_norm_(self._trainable, self.config.gradient_clip)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self.config, self.step)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return _metrics(self.step, objective, batch)

    @torch.no_grad()
    def validate(self, batch: SupervisedBatch) -> StepMetrics:
        """The same figures without learning; anchors depend on the seed alone."""
        return _metrics(self.step, self._objective(batch, np.random.default_rng(self.config.seed)), batch)

    def _objective(self, batch: SupervisedBatch, rng: np.random.Generator) -> Objective:
        blocks = sample_anchors(
            rng, batch.reply_starts.numpy(), batch.lengths.numpy(), self.config.anchors_per_sequence
        ).to(self.device)
        with torch.autocast(self.device.type, dtype=self._dtype, enabled=self._dtype != torch.float32):
            return draft_objective(self.model, self._vocabulary, batch.to(self.device), blocks, self._settings)

    def _share_start(self) -> None:
        """The first worker's weights for all: what was computed from the corpus may differ in the last bit."""
        if _alone():
            return
        for parameter in self._trainable:
            dist.broadcast(parameter.data, src=0)

    def _average_gradients(self) -> None:
        if _alone():
            return
        for parameter in self._trainable:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())

    def save(self, folder: Path) -> None:
        """Write the state that `load` continues from bit for bit: whole, or not at all.

        Raises OSError naming the file; the state that was there before is then still there.
        """
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "step": self.step,
            "model": {name: p.detach() for name, p in self.model.named_parameters() if name not in FROZEN},
            "optimizer": self._optimizer.state_dict(),
        }
        handle, partial = tempfile.mkstemp(prefix=".partial-", dir=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, folder / STATE_FILE)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(folder / STATE_FILE)) from error
        finally:
            Path(partial).unlink(missing_ok=True)

    def load(self, folder: Path) -> None:
        """Raises CheckpointError where the state is missing, damaged or of another drafter."""
        path = folder / STATE_FILE
        try:
            state: dict[str, Any] = torch.load(path, map_location=self.device, weights_only=True)
            weights, optimizer, step = state["model"], state["optimizer"], int(state["step"])
        except Exception as error:
            raise CheckpointError(f"{path} cannot be read as a trainer's state: {error!r}") from error
        own = {name: p for name, p in self.model.named_parameters() if name not in FROZEN}
        if {n: t.shape for n, t in weights.items()} != {n: p.shape for n, p in own.items()}:
            raise CheckpointError(f"{path} belongs to a drafter of another shape; give another output folder")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(weights[name])
        self._optimizer.load_state_dict(optimizer)
        self.step = step


def _alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def draft_vocabulary(model: DraftNetwork, dtype: torch.dtype) -> DraftVocabulary:
    from_target = None
    if model.draft_to_target is not None:
        from_target = torch.full((model.config.vocab_size,), -1, device=model.draft_to_target.device)
        from_target[model.draft_to_target] = torch.arange(len(model.draft_to_target), device=from_target.device)
    return DraftVocabulary(model.lm_head.weight.detach().to(dtype), from_target)


def learning_rate(config: OptimisationConfig, step: int) -> float:
    """Linear warm-up, then a cosine from the peak to the final rate."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.num_steps - config.warmup_steps)
    span = config.learning_rate - config.final_learning_rate
    return config.final_learning_rate + span * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 on CUDA and on processors that multiply it, else float32."""
    if name != "auto":
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype)
        return dtype
    capabilities = torch.cpu.get_capabilities()
    fast = device.type == "cuda" or any(capabilities.get(key) for key in ("avx512_bf16", "amx_bf16"))
    return torch.bfloat16 if fast else torch.float32


def _metrics(step: int, objective: Objective, batch: SupervisedBatch) -> StepMetrics:
    acceptance, mask = objective.acceptance.double(), objective.mask
    counts = mask.sum((0, 1)).clamp(min=1)
    whole = mask.all(-1)
    survived = acceptance[whole].cumprod(-1).sum(-1)
    return StepMetrics(
        step,
        float(objective.loss.detach()),
        float(objective.cross_entropy),
        float(objective.total_variation),
        float(objective.confidence),
        (acceptance.sum((0, 1)) / counts).cpu().numpy(),
        1 + (float(survived.mean()) if len(survived) else 0.0),
        int(mask.sum()),
        batch.num_tokens,
    )
