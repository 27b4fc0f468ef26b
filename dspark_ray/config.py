"""The one configuration tree, validated once; unknown keys are refused by name.

Every default is what the demo runs. Nothing else (environment, flags) configures the application.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

DrafterKind = Literal["dspark", "dflash", "autoregressive", "draft_model", "ngram", "none"]
Policy = Literal["adaptive", "algorithm1", "static", "threshold", "none"]
DType = Literal["auto", "float32", "bfloat16", "float16"]

DEMO_MODEL = "smollm2-135m-instruct"
DEMO_DRAFTER = "smollm2-135m-dspark"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetConfig(_Section):
    """The large model and the group that runs it."""

    model: str = Field(DEMO_MODEL, description="demo name, folder, or Hugging Face id")
    served_model_name: str | None = Field(None, description="name clients use; default: last part of `model`")
    dtype: DType = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    tensor_parallel_size: int = Field(1, ge=1)
    max_model_len: int | None = Field(None, ge=8, description="context limit in tokens; default: the model's")
    row_invariant: bool = Field(
        True, description="bfloat16 on CPU: a token's logits do not depend on the load (steps over 32 tokens cost more)"
    )
    num_threads: int = Field(2, ge=1, description="CPU threads of each rank")
    num_cpus: float = Field(1.0, ge=0, description="Ray CPUs reserved for each rank")
    num_replicas: int = Field(1, ge=1)
    placement_timeout_seconds: float = Field(60.0, gt=0)

    @property
    def name(self) -> str:
        return self.served_model_name or self.model.rstrip("/").split("/")[-1]


class DrafterConfig(_Section):
    """The drafter and its pool."""

    kind: DrafterKind = "dspark"
    model: str | None = Field(None, description="drafter folder; for draft_model a causal LM; default: the demo's own")
    num_draft_tokens: int | None = Field(None, ge=1, le=32, description="default: the checkpoint's block_size, else 4")
    dtype: DType = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_replicas: int = Field(2, ge=1)
    num_threads: int = Field(1, ge=1)
    num_cpus: float = Field(0.25, ge=0)
    num_gpus: float = Field(0.0, ge=0)
    draft_top_k: int = Field(64, ge=1, description="support of the truncated draft distribution (rejection mode)")
    ngram_min: int = Field(2, ge=1)
    ngram_max: int = Field(4, ge=1)
    calibration: str | None = Field(None, description="calibration.json; default: the one beside the checkpoint")
    step_timeout_seconds: float = Field(30.0, gt=0, description="a drafter that stalls a step this long is replaced")

    @property
    def reads_features(self) -> bool:
        """The drafter is a network over hidden states of the target, not over tokens alone."""
        return self.kind in ("dspark", "dflash", "autoregressive")

    @model_validator(mode="after")
    def _ngram_order(self) -> "DrafterConfig":
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min ({self.ngram_min}) must not exceed ngram_max ({self.ngram_max})")
        return self


class VerificationConfig(_Section):
    """How much of each draft is verified (paper 3.2.2 and 5.2)."""

    policy: Policy = "adaptive"
    static_len: int = Field(7, ge=0, description="drafts verified a request and step (policy static)")
    threshold: float = Field(0.3, ge=0, le=1, description="least survival that is verified (policy threshold)")
    budget_lag: int = Field(2, ge=1, description="steps between the confidences a budget rests on and its use")
    cost_table: str | None = Field(None, description="JSON from `dspark-ray profile`; default: profile at start-up")
    cache_cost_table: bool = Field(True, description="keep the profiled table in the user's cache for the next start")
    fallback_confidence: float = Field(0.7, ge=0, le=1, description="first estimate where a drafter has no head")


class EngineConfig(_Section):
    """Batching and memory."""

    page_size: int = Field(16, ge=1)
    num_pages: int | None = Field(None, ge=2, description="default: from free memory")
    kv_memory_fraction: float = Field(0.25, gt=0, le=0.95, description="share of free memory that pages may take")
    max_num_seqs: int = Field(64, ge=1)
    max_prefill_tokens: int = Field(512, ge=1, description="prefill tokens packed into one step")
    max_queued: int = Field(256, ge=1, description="requests waiting or running before 429")
    watchdog_seconds: float = Field(120.0, gt=0, description="no step for so long with work pending: unhealthy")


class ServingConfig(_Section):
    """Serve deployments and limits of the HTTP surface."""

    num_ingress_replicas: int = Field(1, ge=1)
    max_ongoing_requests: int = Field(256, ge=1)
    max_queued_requests: int = Field(512, ge=1)
    request_timeout_seconds: float = Field(600.0, gt=0)
    failover_seconds: float = Field(90.0, gt=0, description="wait for a healthy replica to continue a stream, then 503")
    max_n: int = Field(8, ge=1)


class AppConfig(_Section):
    """Everything `build_app` takes; the `args` of the application in a Serve YAML."""

    target: TargetConfig = Field(default_factory=TargetConfig)
    drafter: DrafterConfig = Field(default_factory=DrafterConfig)
    verification: VerificationConfig = Field(default_factory=VerificationConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    serving: ServingConfig = Field(default_factory=ServingConfig)

    @model_validator(mode="before")
    @classmethod
    def _nest_dotted_keys(cls, data: Any) -> Any:
        """`serve run deployments:build_app drafter.kind=ngram` passes flat keys; a YAML passes nested sections."""
        return nest_dotted_keys(data) if isinstance(data, dict) else data


def nest_dotted_keys(data: dict[str, Any]) -> dict[str, Any]:
    """{"section.key": value} as {"section": {"key": value}}."""
    tree = {key: value for key, value in data.items() if "." not in key}
    for key, value in data.items():
        section, dot, field = key.partition(".")
        if dot and isinstance(tree.setdefault(section, {}), dict):
            tree[section] = {**tree[section], field: value}
    return tree
