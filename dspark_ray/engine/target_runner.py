"""One rank of the target: takes a step's plan and drafts, admits, runs the packed pass, verifies, sends features.

A plain class: TargetWorker wraps it in an actor, LocalExecutor calls it in place. Keeps no request state between steps
but the pages' contents. Every rank computes the same admission from the same bytes; only rank 0 verifies and answers.
Letters: R rows, T packed tokens, K draft positions, D drafters, V vocabulary, d hidden size.
"""

import logging
import time

import numpy as np
import torch

from dspark_ray.algorithm.cost_table import CostTable
from dspark_ray.algorithm.prefix_scheduler import PrefixScheduler
from dspark_ray.algorithm.proposal import DraftBatch
from dspark_ray.algorithm.verification import Verdict, verify
from dspark_ray.config import AppConfig
from dspark_ray.engine.batch import FeatureBatch, StepPlan, StepResult, TargetInfo
from dspark_ray.engine.draft_budget import build_prefix_scheduler
from dspark_ray.engine.memory import num_pages_that_fit
from dspark_ray.engine.packing import AlignedDrafts, align_drafts, feature_batches, pack
from dspark_ray.engine.profiler import profile_target
from dspark_ray.models.attention import ANY_QUERIES, QUERIES, build_attention_batch
from dspark_ray.models.checkpoints import load_feature_projection
from dspark_ray.models.draft_config import check_layer_range, read_draft_config
from dspark_ray.models.draft_model import FeatureProjection
from dspark_ray.models.resolve import resolve_drafter, resolve_model
from dspark_ray.models.target import TargetModel, resolve_device, resolve_dtype

logger = logging.getLogger(__name__)

DEFAULT_DRAFT_TOKENS = 4  # for drafters whose checkpoint names no block size


def resolve_num_draft_tokens(config: AppConfig) -> int:
    """K: as configured, else the checkpoint's block size, else DEFAULT_DRAFT_TOKENS; 0 without a drafter."""
    drafter = config.drafter
    if drafter.kind == "none":
        return 0
    if drafter.reads_features:
        folder = str(resolve_drafter(drafter, config.target.model))
        return read_draft_config(folder).resolve_num_draft_tokens(drafter.num_draft_tokens)
    return drafter.num_draft_tokens or DEFAULT_DRAFT_TOKENS


class TargetRunner:
    """Owns one rank's model and pages. `load` before anything else; `set_cost_table` before a policy needs it."""

    def __init__(self, config: AppConfig, rank: int = 0, world_size: int = 1) -> None:
        self._config, self._rank, self._world_size = config, rank, world_size
        self._scheduler: PrefixScheduler | None = None
        self._projection: FeatureProjection | None = None

    def load(self) -> TargetInfo:
        """Load weights, taps and pages; returns what the engine must know (the same on every rank)."""
        target = self._config.target
        folder = str(resolve_model(target.model))
        self._device = resolve_device(target.device)  # Ray shows each rank one GPU, so its index is 0
        dtype = resolve_dtype(target.dtype, self._device)
        self._model = TargetModel.load(
            folder,
            dtype=dtype,
            device=self._device,
            tp_size=self._world_size,
            row_invariant=target.row_invariant,
        )
        self._num_draft_tokens = resolve_num_draft_tokens(self._config)
        self._load_projection(dtype)
        engine = self._config.engine
        max_len = min(target.max_model_len or self._model.max_positions, self._model.max_positions)
        num_pages = engine.num_pages or num_pages_that_fit(
            self._model.kv_bytes_per_token(self._world_size) * engine.page_size,
            engine.kv_memory_fraction,
            self._device,
            most=engine.max_num_seqs * -(-max_len // engine.page_size),
        )
        self._cache = self._model.allocate(num_pages, engine.page_size, self._world_size)
        self._info = TargetInfo(
            num_pages=num_pages,
            page_size=engine.page_size,
            max_model_len=min(max_len, num_pages * engine.page_size),
            vocab_size=self._model.vocab_size,
            num_draft_tokens=self._num_draft_tokens,
            dtype=str(dtype).removeprefix("torch."),
            device=self._device.type,
            provenance=self._provenance(folder),
        )
        return self._info

    def _provenance(self, folder: str) -> dict[str, str]:
        return {
            "model": folder,
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu",
            "tensor_parallel_size": str(self._world_size),
            "threads": str(torch.get_num_threads()),
            "torch": torch.__version__,
        }

    def _load_projection(self, dtype: torch.dtype) -> None:
        """Rank 0 carries the drafter's fc and hidden_norm, so that d numbers a token travel instead of m x d."""
        drafter = self._config.drafter
        if not drafter.reads_features or self._rank != 0:
            return
        folder = str(resolve_drafter(drafter, self._config.target.model))
        layers = read_draft_config(folder).target_layer_ids
        check_layer_range(layers, self._model.num_layers)
        self._model.tap(layers)
        self._projection = load_feature_projection(folder, dtype=dtype, device=self._device)

    def set_cost_table(self, table: CostTable | None) -> None:
        """Give the admission its SPS curve; raises ConfigError if the policy needs one and there is none."""
        self._scheduler = build_prefix_scheduler(self._config.verification, self._num_draft_tokens, table)

    @property
    def feature_shape(self) -> tuple[int, torch.dtype]:
        """(size, dtype) of a feature row on its way to a drafter; size 0 for drafters that need only tokens."""
        return (self._projection.fc.out_features if self._projection is not None else 0, self._model.dtype)

    def profile(self) -> CostTable:
        """Measure step time by batch tokens with synthetic steps. Call before serving."""

        def run(plan: StepPlan, verify_lens: np.ndarray) -> object:
            empty = align_drafts(plan, self._num_draft_tokens, ())
            return self.run(plan, empty, verify_lens, 0)

        return profile_target(run, self._info, self._config.engine.max_num_seqs)

    def execute(
        self, plan: StepPlan, num_drafters: int, *drafts: DraftBatch
    ) -> tuple[StepResult | None, tuple[FeatureBatch, ...]]:
        """One step. Rank 0 returns the result and a FeatureBatch per drafter; other ranks (None, ())."""
        aligned = align_drafts(plan, self._num_draft_tokens, drafts)
        return self.run(plan, aligned, self._admit(plan, aligned), num_drafters)

    def _admit(self, plan: StepPlan, aligned: AlignedDrafts) -> np.ndarray:  # [R] verify_len
        """Verification lengths of the sampling rows; rows that only prefill count as tokens of the step."""
        assert self._scheduler is not None, "set_cost_table comes before the first step"
        rows = np.flatnonzero(plan.samples)
        lens = np.zeros(plan.num_rows, dtype=np.int64)
        lens[rows] = self._scheduler.lens(
            aligned.survival[rows],
            np.minimum(aligned.num_drafts, plan.max_drafts)[rows],
            prefill_tokens=len(plan.token_ids) - len(rows),
            draft_budget=plan.draft_budget,
        )
        return lens

    def run(
        self, plan: StepPlan, aligned: AlignedDrafts, verify_lens: np.ndarray, num_drafters: int
    ) -> tuple[StepResult | None, tuple[FeatureBatch, ...]]:
        """The forward pass over anchors, prefill chunks and the given prefix of each draft, then verification."""
        started = time.perf_counter()
        packed = pack(plan, aligned, verify_lens)
        output = self._model.forward(
            torch.from_numpy(packed.token_ids).to(self._device),
            torch.from_numpy(packed.positions).to(self._device),
            self._cache,
            build_attention_batch(
                plan.page_table,
                self._config.engine.page_size,
                plan.start_positions,
                packed.lens,
                causal=True,
                device=self._device,
                sizes=(QUERIES,) if self._config.target.row_invariant else ANY_QUERIES,
            ),
            torch.from_numpy(packed.logit_rows).to(self._device),
        )
        if self._rank != 0:
            return None, ()
        verdict = self._verify(plan, aligned, verify_lens, output.logits)
        committed = plan.query_lens + verdict.num_accepted
        features = feature_batches(
            plan, packed, committed, verdict, verify_lens, self._project(output.taps), num_drafters
        )
        result = _result(plan, aligned, verify_lens, verdict, len(packed.token_ids), time.perf_counter() - started)
        return result, features

    def _project(self, taps: torch.Tensor | None) -> torch.Tensor | None:
        if self._projection is None or taps is None:
            return None
        with torch.inference_mode():
            return self._projection(taps).cpu()

    def _verify(self, plan: StepPlan, aligned: AlignedDrafts, verify_lens: np.ndarray, logits: torch.Tensor) -> Verdict:
        """Verify the sampling rows; rows that only prefill get an empty verdict."""
        rows = np.flatnonzero(plan.samples)
        width = self._num_draft_tokens + 1
        tokens = np.zeros((plan.num_rows, width), dtype=np.int64)
        num_accepted = np.zeros(plan.num_rows, dtype=np.int64)
        failed = np.zeros(plan.num_rows, dtype=bool)
        if len(rows):
            with torch.inference_mode():
                verdict = verify(
                    logits,
                    torch.from_numpy(aligned.tokens[rows]).to(self._device),
                    verify_lens[rows],
                    _select(aligned.q_ids, rows, self._device),
                    _select(aligned.q_probs, rows, self._device),
                    plan.sampling.select(rows),
                    (plan.start_positions + plan.query_lens - 1)[rows],
                    plan.step,
                )
            tokens[rows], num_accepted[rows], failed[rows] = verdict.tokens, verdict.num_accepted, verdict.failed
        return Verdict(tokens, num_accepted, failed)


def _select(values: np.ndarray | None, rows: np.ndarray, device: torch.device) -> torch.Tensor | None:
    return None if values is None else torch.from_numpy(values[rows]).to(device)


def _result(
    plan: StepPlan, aligned: AlignedDrafts, verify_lens: np.ndarray, verdict: Verdict, batch_tokens: int, seconds: float
) -> StepResult:
    return StepResult(
        step=plan.step,
        tokens=verdict.tokens,
        num_new=np.where(plan.samples & ~verdict.failed, verdict.num_accepted + 1, 0),
        num_drafted=aligned.num_drafts,
        num_admitted=verify_lens,
        num_accepted=verdict.num_accepted,
        survival=aligned.survival,
        failed=verdict.failed,
        batch_tokens=batch_tokens,
        step_seconds=seconds,
        draft_seconds=aligned.draft_seconds,
    )
