"""Training sequences: what the corpus stage writes and every later stage reads, as shards of JSON lines.

Knows no model. A shard is written under another name and renamed, so a shard that exists is whole.
"""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dspark_ray.errors import ConfigError

Split = Literal["train", "validation"]


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """A prompt and the target's own reply to it."""

    token_ids: tuple[int, ...]  # prompt, then reply with its end-of-sequence token where it ended by one
    reply_start: int  # index of the first reply token, 1 .. len(token_ids) - 1
    temperature: float  # that the reply was sampled at

    def to_json(self) -> str:
        return json.dumps(
            {"token_ids": list(self.token_ids), "reply_start": self.reply_start, "temperature": self.temperature},
            separators=(",", ":"),
        )


def shard_path(folder: Path, split: Split, index: int) -> Path:
    return folder / f"{split}-{index:05d}.jsonl"


def num_shards(folder: Path, split: Split) -> int:
    return len(list(folder.glob(f"{split}-*.jsonl")))


def write_shard(path: Path, sequences: Iterable[TrainingSequence]) -> None:
    """Write a whole shard or none."""
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(sequence.to_json() + "\n" for sequence in sequences)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def read_sequences(folder: Path, split: Split) -> list[TrainingSequence]:
    """Every sequence of a split, in the order of its shards. Raises ConfigError naming the file and line, or where
    there are none."""
    sequences = list(read_shards(folder, split))
    if not sequences:
        raise ConfigError(f"{folder} holds no {split} sequences: run the corpus stage first (`dspark-ray train`)")
    return sequences


def read_shards(folder: Path, split: Split) -> Iterator[TrainingSequence]:
    """The same, and nothing where there are none."""
    for shard in sorted(folder.glob(f"{split}-*.jsonl")):
        yield from _read_shard(shard)


def _read_shard(path: Path) -> list[TrainingSequence]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]


def _parse(line: str, place: str) -> TrainingSequence:
    try:
        data: dict[str, Any] = json.loads(line)
        ids, start = tuple(map(int, data["token_ids"])), int(data["reply_start"])
        temperature = float(data["temperature"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{place} is not a training sequence: {error!r}") from error
    if not 1 <= start < len(ids):
        raise ConfigError(f"{place}: reply_start is {start}, expected 1..{len(ids) - 1}")
    return TrainingSequence(ids, start, temperature)
