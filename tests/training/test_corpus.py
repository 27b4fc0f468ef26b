"""The corpus stage on a tiny chat model: real generation, rows that cannot be used, resuming, splits."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dspark_ray.errors import ConfigError
from dspark_ray.offline import load_tokenizer
from dspark_ray.training import corpus
from dspark_ray.training.config import CorpusConfig, TeacherConfig
from dspark_ray.training.corpus import PROVENANCE_FILE, CorpusCounts, make_corpus
from dspark_ray.training.prompts import ChatTemplate, is_validation, read_prompt_rows
from dspark_ray.training.sequences import num_shards, read_sequences, read_shards
from tests.chat_models import save_chat_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_chat_model(folder)
    return folder


def corpus_config(**fields: Any) -> CorpusConfig:
    small = {"max_prompt_tokens": 96, "max_reply_tokens": 24, "min_reply_tokens": 2, "shard_sequences": 4}
    return CorpusConfig.model_validate({**small, "concurrency": 8, "num_threads": 1, "validation_share": 0, **fields})


def make(target: Path, folder: Path, config: CorpusConfig) -> CorpusCounts:
    teacher = TeacherConfig(model=str(target), dtype="float32", device="cpu")
    return make_corpus(teacher, config, folder, lambda counts: None)


def write_rows(path: Path, *rows: object) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_rows_that_cannot_be_used_are_counted_by_reason_and_the_rest_is_answered(target: Path, tmp_path: Path) -> None:
    prompts = write_rows(
        tmp_path / "prompts.jsonl",
        {"turns": ["Hello there"]},
        {"messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "How are you?"}]},
        {"turns": ["  hello   THERE"]},  # the same but for case and white space
        {"turns": []},
        {"turns": [" "]},
        {"text": "no chat"},
        "not json",
        '["a list"]',
        {"turns": [5]},
        {"turns": ["x" * 200]},
        {"turns": ["What is held out?"]},
    )
    held_out = write_rows(tmp_path / "held_out.jsonl", {"turns": ["what is held out?"]})
    config = corpus_config(prompts=(prompts,), held_out=(held_out,), synthesise=False, num_reply_tokens=10_000)
    counts = make(target, tmp_path / "corpus", config)
    short = counts.skipped.pop("reply too short", 0)
    assert counts.skipped == Counter(
        {"duplicate prompt": 1, "empty row": 2, "not a chat row": 4, "prompt too long": 1, "held out": 1}
    )
    template = ChatTemplate(load_tokenizer(target))
    sequences = list(read_shards(tmp_path / "corpus", "train"))
    assert len(sequences) == counts.sequences["train"] == 2 - short
    wanted = {template.prompt("Hello there"), template.prompt("How are you?")}
    assert {sequence.token_ids[: sequence.reply_start] for sequence in sequences} <= wanted


def test_replies_are_the_targets_own(target: Path, tmp_path: Path) -> None:
    """At temperature 0 the reply in the corpus is what the plain model says, up to and with its end token."""

    prompts = write_rows(tmp_path / "p.jsonl", *({"turns": [text]} for text in ("one", "two", "three", "four")))
    config = corpus_config(prompts=(prompts,), synthesise=False, temperatures=((0.0, 1.0),), min_reply_tokens=1)
    make(target, tmp_path / "corpus", config)
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    sequences = read_sequences(tmp_path / "corpus", "train")
    assert len(sequences) == 4
    for sequence in sequences:
        prompt = torch.tensor([sequence.token_ids[: sequence.reply_start]])
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False)
        assert sequence.token_ids == tuple(expected[0].tolist())
        assert sequence.temperature == 0.0


def test_the_target_writes_user_turns_where_there_are_no_prompts(target: Path, tmp_path: Path) -> None:
    pattern = {"opening": "Why", "closing": " Be brief."}
    config = corpus_config(turn_patterns=(pattern,), num_reply_tokens=150, replies_per_prompt=2)
    counts = make(target, tmp_path / "corpus", config)
    assert counts.reply_tokens["train"] >= 150
    tokenizer = load_tokenizer(target)
    sequences = read_sequences(tmp_path / "corpus", "train")
    prompts = [sequence.token_ids[: sequence.reply_start] for sequence in sequences]
    for prompt in prompts:
        text = tokenizer.decode(prompt)
        assert text.startswith("<|im_start|>user\nWhy")
        assert text.endswith(" Be brief.<|im_end|>\n<|im_start|>assistant\n")
    assert max(Counter(prompts).values()) == 2
    greedy = Counter(s.token_ids[: s.reply_start] for s in sequences if s.temperature == 0.0)
    assert max(greedy.values(), default=1) == 1


def test_a_second_run_goes_on_behind_the_shards_of_the_first(target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    prompts = write_rows(tmp_path / "p.jsonl", *({"turns": [f"question {i}"]} for i in range(10)))
    first = corpus_config(prompts=(prompts,), synthesise=False, num_reply_tokens=1, min_reply_tokens=1)
    make(target, folder, first)
    before = {path.name: path.read_bytes() for path in folder.glob("train-*.jsonl")}
    done = len(list(read_shards(folder, "train")))
    assert 0 < done < 10
    counts = make(target, folder, first.model_copy(update={"num_reply_tokens": 10_000}))
    assert counts.sequences["train"] == 10
    assert {name: (folder / name).read_bytes() for name in before} == before
    sequences = read_sequences(folder, "train")
    assert len({sequence.token_ids[: sequence.reply_start] for sequence in sequences}) == 10
    stored = json.loads((folder / PROVENANCE_FILE).read_text())
    assert stored["sequences"] == {"train": 10}
    assert stored["skipped"]["duplicate prompt"] == done
    # Nothing left to do: nothing is generated, nothing is changed.
    again = make(target, folder, first)
    assert again.sequences == counts.sequences
    assert num_shards(folder, "train") == len(list(folder.glob("train-*.jsonl")))


def test_a_prompts_split_depends_on_the_prompt_alone(target: Path, tmp_path: Path) -> None:
    texts = [f"ask {i}" for i in range(12)]
    prompts = write_rows(tmp_path / "p.jsonl", *({"turns": [text]} for text in texts))
    config = corpus_config(prompts=(prompts,), synthesise=False, validation_share=0.5, min_reply_tokens=1)
    make(target, tmp_path / "corpus", config)
    template = ChatTemplate(load_tokenizer(target))
    validation = {
        template.prompt(text) for text in texts if is_validation(template.fingerprint(template.prompt(text)), 0.5)
    }
    assert 0 < len(validation) < 12
    held = {s.token_ids[: s.reply_start] for s in read_sequences(tmp_path / "corpus", "validation")}
    assert held == validation


def test_a_prompt_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"corpus.prompts: .*missing.jsonl cannot be read"):
        list(read_prompt_rows([str(tmp_path / "missing.jsonl")], Counter()))


def test_interrupted_it_keeps_what_is_finished(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "REPORT_SECONDS", 0.0)
    prompts = write_rows(tmp_path / "p.jsonl", *({"turns": [f"question {i}"]} for i in range(10)))
    config = corpus_config(prompts=(prompts,), synthesise=False, min_reply_tokens=1, shard_sequences=100)
    teacher = TeacherConfig(model=str(target), dtype="float32", device="cpu")

    def interrupt(counts: CorpusCounts) -> None:
        if counts.sequences.total() == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_corpus(teacher, config, tmp_path / "corpus", interrupt)
    assert len(read_sequences(tmp_path / "corpus", "train")) == 3
    assert json.loads((tmp_path / "corpus" / PROVENANCE_FILE).read_text())["sequences"] == {"train": 3}
    assert make(target, tmp_path / "corpus", config).sequences["train"] == 10
