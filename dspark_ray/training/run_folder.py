"""Where a training run keeps what: DIR is the drafter itself, DIR/training what it was made from and with."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dspark_ray.models.files import replace_text
from dspark_ray.training.training_loop import TrainingRecord


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run. `drafter` is servable once it is trained: config.json, model.safetensors, calibration.json."""

    drafter: Path
    other_corpus: Path | None = None  # the corpus of another run, read only

    @property
    def corpus(self) -> Path:
        return self.other_corpus or self.drafter / "training" / "corpus"

    @property
    def state(self) -> Path:
        """Setup and checkpoints."""
        return self.drafter / "training" / "run"

    @property
    def metrics(self) -> Path:
        return self.drafter / "training" / "metrics.jsonl"

    @property
    def pictures(self) -> Path:
        return self.drafter / "training"

    def keep_config(self, yaml_text: str) -> None:
        """The configuration that made the run, beside it."""
        replace_text(self.drafter / "training" / "config.yaml", yaml_text)

    def append_metrics(self, record: TrainingRecord) -> None:
        """On a line of its own, also behind one that a kill cut short."""
        self.metrics.parent.mkdir(parents=True, exist_ok=True)
        with self.metrics.open("ab+") as file:
            file.seek(max(0, file.tell() - 1))
            whole = file.read() in (b"", b"\n")
            file.write((b"" if whole else b"\n") + record.to_json().encode() + b"\n")

    def read_metrics(self) -> list[TrainingRecord]:
        """Records so far; of a step that a resumed run did again, the later one. Lines cut short are left out."""
        if not self.metrics.is_file():
            return []
        latest = {}
        for line in self.metrics.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):  # only the log of a run: not worth the run
                record = TrainingRecord.from_json(line)
                latest[record.split, record.step] = record
        return sorted(latest.values(), key=lambda record: record.step)
