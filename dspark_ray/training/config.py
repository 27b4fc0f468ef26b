"""What `dspark-ray train` can be told, validated once; unknown keys are refused by name. Imports nothing heavy."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dspark_ray.config import DEMO_MODEL, DType, nest_dotted_keys

DraftArchitecture = Literal["dspark", "dflash", "autoregressive"]
MarkovHeadName = Literal["vanilla", "gated", "rnn"]
Stage = Literal["corpus", "train", "calibrate", "evaluate"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TeacherConfig(_Section):
    """The frozen target: it writes the corpus and its features are what the drafter learns from."""

    model: str = Field(DEMO_MODEL, description="demo name, folder, or Hugging Face id")
    dtype: DType = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_feature_workers: int = Field(1, ge=1, description="target actors that stream features to the trainers")
    num_threads: int = Field(1, ge=1, description="CPU threads of each")
    num_cpus: float = Field(0.5, ge=0, description="Ray CPUs reserved for each")
    num_gpus: float = Field(0.0, ge=0, description="Ray GPUs reserved for each")
    max_batch_tokens: int = Field(2048, ge=16, description="tokens in one target forward pass")


class TurnPattern(_Section):
    """How some of the synthesised user turns begin and end; the target writes what is between."""

    opening: str = ""
    closing: str = ""
    share: float = Field(1.0, gt=0)


class CorpusConfig(_Section):
    """Where prompts come from and how the target answers them."""

    prompts: tuple[str, ...] = Field((), description='JSONL files of {"turns": [...]} or {"messages": [...]}')
    synthesise: bool = Field(True, description="let the target write user turns where `prompts` gives too few")
    held_out: tuple[str, ...] = Field((), description="JSONL files whose prompts are never trained on")
    num_reply_tokens: int = Field(1_000_000, ge=1, description="stop when the replies hold so many tokens")
    temperatures: tuple[tuple[float, float], ...] = Field(
        ((0.0, 0.35), (0.7, 0.25), (1.0, 0.4)), description="(temperature, share of the replies)"
    )
    replies_per_prompt: int = Field(1, ge=1, description="each at a temperature of its own draw, greedy at most once")
    synthesis_temperature: float = Field(1.0, gt=0, description="of the user turns that the target writes")
    turn_patterns: tuple[TurnPattern, ...] = Field((TurnPattern(),), min_length=1, description="of those user turns")
    max_prompt_tokens: int = Field(256, ge=1, description="longer prompts are skipped and counted")
    max_reply_tokens: int = Field(256, ge=1)
    min_reply_tokens: int = Field(8, ge=1, description="shorter replies are skipped and counted")
    validation_share: float = Field(0.03, ge=0, lt=1, description="of the prompts, by hash: never trained on")
    shard_sequences: int = Field(128, ge=1, description="sequences between two writes; a shard is never made again")
    concurrency: int = Field(96, ge=1, description="requests that run together")
    num_threads: int = Field(2, ge=1)
    seed: int = Field(0, ge=0, description="of temperatures and patterns; the sampled text itself is not reproducible")

    @model_validator(mode="after")
    def _some_source(self) -> "CorpusConfig":
        if not self.prompts and not self.synthesise:
            raise ValueError("prompts is empty and synthesise is false: there is nothing to train on")
        if not self.temperatures or any(t < 0 or share <= 0 for t, share in self.temperatures):
            raise ValueError(
                f"temperatures must be pairs of (temperature >= 0, share > 0), got {list(self.temperatures)}"
            )
        return self


class DraftShapeConfig(_Section):
    """The drafter to be trained."""

    architecture: DraftArchitecture = "dspark"
    num_layers: int = Field(2, ge=1, description="autoregressive: always one")
    block_size: int = Field(7, ge=2, le=32, description="positions of a draft block (gamma)")
    target_layer_ids: tuple[int, ...] | None = Field(None, description="tapped layers; default: five, spread evenly")
    markov_head: MarkovHeadName = "vanilla"
    markov_rank: int = Field(64, ge=1)
    draft_vocab_size: int | None = Field(None, ge=2, description="most frequent tokens only; default: all")
    num_key_value_heads: int | None = Field(None, ge=1, description="default: as many as query heads")
    intermediate_size: int | None = Field(None, ge=1, description="default: the target's")
    mask_token_id: int | None = Field(None, ge=0, description="default: the rarest token of the corpus")
    initial_drafter: str | None = Field(None, description="go on from this drafter folder; its shape is taken over")

    @model_validator(mode="after")
    def _one_layer(self) -> "DraftShapeConfig":
        if self.architecture == "autoregressive" and "num_layers" in self.model_fields_set and self.num_layers != 1:
            raise ValueError(f"num_layers is {self.num_layers}, but an autoregressive drafter has one; leave it out")
        return self


class OptimisationConfig(_Section):
    """How it is trained."""

    num_steps: int = Field(2000, ge=1)
    tokens_per_step: int = Field(2048, ge=1, description="sequence tokens a step and trainer; whole sequences")
    anchors_per_sequence: int = Field(64, ge=1, description="random anchors a sequence and step, at most")
    learning_rate: float = Field(1e-3, gt=0)
    final_learning_rate: float = Field(1e-5, ge=0, description="where the cosine ends")
    warmup_steps: int = Field(50, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    gradient_clip: float = Field(1.0, gt=0)
    cross_entropy_weight: float = Field(0.1, ge=0)
    total_variation_weight: float = Field(0.9, ge=0)
    confidence_weight: float = Field(1.0, ge=0)
    decay: float | None = Field(None, gt=0, description="gamma of exp(-(k-1)/gamma); default: 4/7 of block_size")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="of the matmuls; weights stay float32")
    head_chunk: int = Field(256, ge=1, description="positions whose logits exist at once")
    checkpoint_every_steps: int = Field(200, ge=1)
    log_every_steps: int = Field(20, ge=1)
    seed: int = 0


class TrainerConfig(_Section):
    """The trainers: a data-parallel group under Ray Train."""

    num_workers: int = Field(1, ge=1)
    num_threads: int = Field(1, ge=1)
    num_cpus: float = Field(0.5, ge=0)
    use_gpu: bool = False
    prefetch_batches: int = Field(2, ge=1, description="feature batches in flight a trainer: the back-pressure")
    max_failures: int = Field(3, ge=-1, description="restarts from the last checkpoint; -1: without limit")
    placement_timeout_seconds: float = Field(120.0, gt=0, description="how long to wait for room in the cluster")
    feature_cache: Literal["none", "memory", "disk"] = Field(
        "none", description="keep features over epochs; about 2 (m + 1) d bytes a token"
    )


class TrainingConfig(_Section):
    """Everything `dspark-ray train` takes."""

    teacher: TeacherConfig = Field(default_factory=TeacherConfig)
    corpus: CorpusConfig = Field(default_factory=CorpusConfig)
    draft: DraftShapeConfig = Field(default_factory=DraftShapeConfig)
    optimisation: OptimisationConfig = Field(default_factory=OptimisationConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)

    @model_validator(mode="before")
    @classmethod
    def _nest_dotted_keys(cls, data: Any) -> Any:
        return nest_dotted_keys(data) if isinstance(data, dict) else data
