"""Real decoding with a drafter, every draft verified in full: what became of its drafts, and how fast it went."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dspark_ray.algorithm.calibration import SequentialTemperatureScaling
from dspark_ray.algorithm.mode_calibration import CalibrationMode
from dspark_ray.config import AppConfig
from dspark_ray.engine.drafters.factory import CALIBRATION_FILE
from dspark_ray.engine.engine import Engine
from dspark_ray.engine.local_executor import LocalExecutor
from dspark_ray.engine.recording import DraftOutcomes, RecordingExecutor
from dspark_ray.engine.target_runner import resolve_num_draft_tokens
from dspark_ray.offline import Completion, complete_all, open_engine
from dspark_ray.request import GenerationRequest, SamplingParams

Prompts = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Measurement:
    """Some prompts decoded in one mode. `seconds` is the time of all of them together."""

    outcomes: DraftOutcomes
    drafted: int
    emitted: int  # tokens behind the first of each reply
    rounds: int
    token_seconds: float  # summed over requests: of decoding, first tokens left out

    @property
    def accepted_length(self) -> float:
        """Mean tokens a round, bonus included."""
        return self.emitted / self.rounds if self.rounds else 1.0

    @property
    def tokens_per_second(self) -> float:
        """Of one request among those that ran together."""
        return self.emitted / self.token_seconds if self.token_seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "accepted_length": round(self.accepted_length, 4),
            "drafted": self.drafted,
            "admitted": int(self.outcomes.admitted.sum()),
            "accepted": int(self.outcomes.accepted.sum()),
            "emitted": self.emitted,
            "rounds": self.rounds,
            "tokens_per_second": round(self.tokens_per_second, 2),
        }


class Meter:
    """An engine whose drafts are recorded."""

    def __init__(self, engine: Engine, recorder: RecordingExecutor) -> None:
        self._engine, self._recorder, self._count = engine, recorder, 0

    async def measure(
        self,
        prompts: Prompts,
        sampling: SamplingParams,
        concurrency: int,
        on_done: Callable[[Completion], None] | None = None,
    ) -> Measurement:
        """Decode every prompt once. With a seed in `sampling`, prompt i takes seed + i."""
        self._count += 1
        requests = [
            GenerationRequest(f"measure-{self._count}-{index}", prompt, _seeded(sampling, index))
            for index, prompt in enumerate(prompts)
        ]
        self._recorder.take()
        completions = await complete_all(self._engine, requests, concurrency, on_done)
        outcomes = self._recorder.take()
        return Measurement(
            outcomes,
            sum(completion.counts.drafted for completion in completions),
            sum(max(0, len(completion.token_ids) - 1) for completion in completions),
            sum(completion.num_rounds for completion in completions),
            sum(completion.seconds - completion.first_seconds for completion in completions),
        )


@asynccontextmanager
async def open_meter(config: AppConfig, *, raw_confidences: bool = False) -> AsyncIterator[Meter]:
    """An engine in this process that verifies every draft in full: lengths that a scheduler chose would hide the
    rejections it avoided. `raw_confidences`: without the drafter's calibration."""
    length = resolve_num_draft_tokens(config)
    policy = "static" if length else "none"
    with TemporaryDirectory(prefix="dspark-measure-") as scratch:
        drafter = config.drafter
        if raw_confidences:
            identity = Path(scratch) / CALIBRATION_FILE
            SequentialTemperatureScaling.identity(length).save(identity)
            drafter = drafter.model_copy(update={"calibration": str(identity)})
        verification = config.verification.model_copy(update={"policy": policy, "static_len": length})
        config = config.model_copy(update={"verification": verification, "drafter": drafter})
        recorder = RecordingExecutor(LocalExecutor(config))
        async with open_engine(config, recorder) as engine:
            yield Meter(engine, recorder)


def sampling_of(mode: CalibrationMode, temperature: float, max_tokens: int) -> SamplingParams:
    """Sampling parameters whose drafts are judged by `mode`."""
    if mode == "greedy":
        return SamplingParams(temperature=0.0, max_tokens=max_tokens)
    if mode == "coupled":
        return SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=0, verification="coupled")
    return SamplingParams(temperature=temperature, max_tokens=max_tokens, verification="rejection")


def _seeded(sampling: SamplingParams, index: int) -> SamplingParams:
    return sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + index)
