"""Where a run keeps what, and a log that outlives kills and resumptions."""

from pathlib import Path

import yaml

from dspark_ray.training.config import TrainingConfig
from dspark_ray.training.run_folder import RunFolder
from dspark_ray.training.training_loop import TrainingRecord


def record(step: int, loss: float = 1.0, split: str = "train") -> TrainingRecord:
    assert split in ("train", "validation")
    return TrainingRecord(split, step, 40, loss, 2.0, 0.5, 0.25, (0.5, 0.25), 1.625, 1e-3, 100.0, 50.0, 0.125, 3.0)


def test_records_come_back_as_they_were_written_in_the_order_of_steps(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "drafter")
    assert run.read_metrics() == []
    records = [record(10), record(20, 0.5), record(20, 0.25, "validation")]
    for each in reversed(records):
        run.append_metrics(each)
    assert sorted(run.read_metrics(), key=lambda each: (each.step, each.split)) == records


def test_of_a_step_done_twice_the_later_record_counts(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for each in (record(10, 3.0), record(20, 2.0), record(10, 1.0)):
        run.append_metrics(each)
    assert [(each.step, each.loss) for each in run.read_metrics()] == [(10, 1.0), (20, 2.0)]


def test_a_record_cut_short_by_a_kill_costs_no_other(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.append_metrics(record(10))
    run.metrics.write_text(run.metrics.read_text() + record(20).to_json()[:40])
    run.append_metrics(record(20))
    run.append_metrics(record(30))
    assert [each.step for each in run.read_metrics()] == [10, 20, 30]


def test_another_runs_corpus_is_used_where_it_lies(tmp_path: Path) -> None:
    assert RunFolder(tmp_path / "a").corpus == tmp_path / "a" / "training" / "corpus"
    assert RunFolder(tmp_path / "a", tmp_path / "b").corpus == tmp_path / "b"


def test_the_kept_configuration_makes_the_same_run_again(tmp_path: Path) -> None:
    config = TrainingConfig.model_validate(
        {
            "teacher.model": "org/model",
            "corpus.prompts": ("a.jsonl",),
            "corpus.turn_patterns": [{"opening": "Why", "share": 0.5}, {}],
            "draft.architecture": "autoregressive",
            "optimisation.num_steps": 7,
        }
    )
    run = RunFolder(tmp_path / "drafter")
    run.keep_config(yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True)))
    kept = yaml.safe_load((tmp_path / "drafter" / "training" / "config.yaml").read_text())
    assert TrainingConfig.model_validate(kept) == config
