"""Drafters: state keyed by request id, loss that costs drafts only, and what travels with a draft."""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dspark_ray.algorithm.calibration import SequentialTemperatureScaling
from dspark_ray.algorithm.mode_calibration import ModeCalibration
from dspark_ray.algorithm.proposal import DraftProposal
from dspark_ray.config import AppConfig
from dspark_ray.engine.drafters.autoregressive import AutoregressiveDrafter
from dspark_ray.engine.drafters.dspark import DSparkDrafter
from dspark_ray.engine.drafters.factory import build_drafter
from dspark_ray.engine.drafters.ngram import NgramDrafter, lookup, updated_acceptance
from dspark_ray.errors import ConfigError
from dspark_ray.models.checkpoints import load_autoregressive_model, load_draft_model
from tests.engine.drafting import Row, Steps

HIDDEN = 16


@pytest.fixture
def folder(fixtures_dir: Path) -> Path:
    return fixtures_dir


@pytest.fixture(params=["rnn", "autoregressive"])
def head(request: pytest.FixtureRequest) -> str:
    """Drafters over features: a whole block at once, and one token after another."""
    return str(request.param)


def _drafter(folder: Path, head: str, num_pages: int = 64, **options: object) -> DSparkDrafter | AutoregressiveDrafter:
    autoregressive = head == "autoregressive"
    load = load_autoregressive_model if autoregressive else load_draft_model
    model = load(str(folder / f"draft_{head}"), str(folder / "target"), dtype=torch.float32, device="cpu")
    options = {"num_draft_tokens": model.config.max_draft_tokens, "page_size": 4} | options
    drafter = AutoregressiveDrafter if autoregressive else DSparkDrafter
    return drafter(model, num_pages=num_pages, **options)  # type: ignore[arg-type, return-value]


def _row(request_id: str, start: int, count: int, **fields: object) -> Row:
    """Features that depend on the request and the position alone."""
    generator = torch.Generator().manual_seed(sum(request_id.encode()))
    features = torch.randn(256, HIDDEN, generator=generator)[start : start + count]
    return Row(
        request_id, start, [1] * count, anchor=(len(request_id) + start + count) % 60, features=features, **fields
    )


def _same(one: DraftProposal, other: DraftProposal) -> bool:
    return one.tokens.tolist() == other.tokens.tolist() and np.allclose(one.confidences, other.confidences, atol=1e-5)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_the_drafter_reproduces_two_rounds_of_the_dense_implementation(folder: Path, head: str) -> None:
    drafter = _drafter(folder, head)
    steps, golden = Steps(drafter), load_file(folder / f"draft_{head}" / "golden.safetensors")
    start = 0
    for name in ("r1", "r2"):
        features = drafter._model.project(golden[f"{name}_features"][0])
        draft = steps(Row("a", start, [0] * len(features), int(golden[f"{name}_anchor"]), features))["a"]
        assert draft.tokens.tolist() == golden[f"{name}_tokens"][0].tolist()
        expected = torch.sigmoid(golden[f"{name}_confidence_logits"][0]).numpy()
        np.testing.assert_allclose(draft.confidences, expected, atol=1e-4)
        start += len(features)
    assert steps.last is not None
    assert steps.last.draft_seconds > 0
    assert steps.last.anchor_positions.tolist() == [start]


@pytest.mark.parametrize("style", [{}, {"temperature": 1.0, "coupled": True}])
def test_a_batch_of_requests_drafts_what_each_drafts_alone(folder: Path, head: str, style: dict[str, object]) -> None:
    names, together = ["a", "bb", "ccc", "dddd"], Steps(_drafter(folder, head))
    alone = {name: Steps(_drafter(folder, head)) for name in names}
    lengths = {"a": 3, "bb": 17, "ccc": 1, "dddd": 40}
    for round_ in range(3):
        rows = [
            _row(name, 0, lengths[name], **style)
            if round_ == 0
            else _row(name, lengths[name] + 2 * round_ - 2, 2, **style)
            for name in names
        ]
        drafts = together(*rows)
        for name, row in zip(names, rows, strict=True):
            assert _same(drafts[name], alone[name](row)[name])


def test_finishing_the_first_request_leaves_the_others_drafts_unchanged(folder: Path, head: str) -> None:
    ids = [f"r{number}" for number in range(8)]
    kept, one_gone = Steps(_drafter(folder, head)), Steps(_drafter(folder, head))
    for steps in (kept, one_gone):
        steps(*[_row(name, 0, 5 + len(name)) for name in ids])
    rows = [_row(name, 5 + len(name), 3) for name in ids]
    expected, drafts = kept(*rows), one_gone(*rows[:0:-1], dropped=("r0",))  # and in another order
    assert "r0" not in drafts
    assert all(_same(drafts[name], expected[name]) for name in ids[1:])


def test_prefill_chunks_and_drafting_rows_mix_in_one_step(folder: Path, head: str) -> None:
    steps, whole = Steps(_drafter(folder, head)), Steps(_drafter(folder, head))
    assert list(steps(_row("a", 0, 6), _row("long", 0, 20, drafts=False))) == ["a"]
    drafts = steps(_row("a", 6, 1), _row("long", 20, 13))
    assert _same(drafts["long"], whole(_row("long", 0, 33))["long"])


def test_a_drafter_that_lost_its_state_drafts_from_what_it_gets(folder: Path, head: str) -> None:
    seen_all, lost = Steps(_drafter(folder, head)), Steps(_drafter(folder, head))
    seen_all(_row("a", 0, 12))
    expected, draft = seen_all(_row("a", 12, 4))["a"], lost(_row("a", 12, 4))["a"]
    assert len(draft.tokens) == len(expected.tokens)
    assert not np.allclose(draft.confidences, expected.confidences)
    assert lost.last is not None
    assert lost.last.anchor_positions.tolist() == [16]  # positions stay true although the cache starts at 0


def test_a_gap_is_appended_and_a_start_over_resets(folder: Path, head: str) -> None:
    gap, reset, fresh = Steps(_drafter(folder, head)), Steps(_drafter(folder, head)), Steps(_drafter(folder, head))
    gap(_row("a", 0, 4))
    assert len(gap(_row("a", 9, 2))["a"].tokens) == 5
    reset(_row("a", 0, 12))
    assert _same(reset(_row("a", 0, 7))["a"], fresh(_row("a", 0, 7))["a"])  # recompute after preemption


def test_broken_features_of_one_request_disturb_no_other_and_are_forgotten(folder: Path, head: str) -> None:
    healthy, disturbed = Steps(_drafter(folder, head, num_pages=6)), Steps(_drafter(folder, head, num_pages=6))
    broken = Row("bad", 0, [1] * 5, 3, torch.full((5, HIDDEN), torch.nan))
    expected, drafts = healthy(_row("a", 0, 4)), disturbed(broken, _row("a", 0, 4))
    assert len(drafts["bad"].tokens) == 0
    assert _same(drafts["a"], expected["a"])
    # Its pages, full of NaN, go to the next request, and it starts again itself.
    drafts = disturbed(_row("b", 0, 4), _row("bad", 5, 1), dropped=("a",))
    assert _same(drafts["b"], healthy(_row("b", 0, 4), dropped=("a",))["b"])
    assert len(drafts["bad"].tokens) == 5
    assert np.isfinite(drafts["bad"].confidences).all()


def test_a_full_page_pool_means_no_drafts_and_never_an_error(folder: Path, head: str) -> None:
    steps = Steps(_drafter(folder, head, num_pages=4))  # 16 tokens: one request of 4 and its block need 3 pages
    assert list(steps(_row("a", 0, 4), _row("b", 0, 4))) == ["a"]
    assert list(steps(_row("a", 4, 1), _row("b", 4, 1))) == ["a"]  # who has pages keeps them
    assert list(steps(_row("b", 5, 1), dropped=("a",))) == ["b"]
    assert list(steps(_row("huge", 0, 60), _row("b", 6, 1))) == ["b"]  # larger than the pool: evicts nobody


def test_the_longest_unused_context_is_evicted(folder: Path, head: str) -> None:
    steps = Steps(_drafter(folder, head, num_pages=7))
    steps(_row("old", 0, 4), _row("new", 0, 4))
    for position in range(4, 8):
        assert list(steps(_row("new", position, 1))) == ["new"]
    assert list(steps(_row("new", 8, 1), _row("third", 0, 4))) == ["new", "third"]


def test_past_the_drafters_own_context_limit_nothing_is_drafted(folder: Path, head: str) -> None:
    steps = Steps(_drafter(folder, head))  # max_position_embeddings 128
    assert list(steps(_row("a", 0, 127))) == ["a"]
    assert list(steps(_row("a", 127, 1))) == []
    assert list(steps(_row("a", 128, 1))) == []


def test_fewer_draft_tokens_are_the_first_of_the_whole_block(folder: Path, head: str) -> None:
    whole, short = Steps(_drafter(folder, head)), Steps(_drafter(folder, head, num_draft_tokens=2))
    expected, draft = whole(_row("a", 0, 9))["a"], short(_row("a", 0, 9))["a"]
    assert draft.tokens.tolist() == expected.tokens[:2].tolist()
    np.testing.assert_allclose(draft.confidences, expected.confidences[:2], atol=1e-6)


def test_dflash_drafts_at_its_masks_with_the_top_probability_as_confidence(folder: Path) -> None:
    drafter = _drafter(folder, "dflash")
    golden = load_file(folder / "draft_dflash" / "golden.safetensors")
    features = drafter._model.project(golden["r1_features"][0])
    draft = Steps(drafter)(Row("a", 0, [0] * 7, int(golden["r1_anchor"]), features))["a"]
    assert draft.tokens.tolist() == golden["r1_tokens"][0].tolist()
    expected = golden["r1_base_logits"][0].softmax(-1).max(-1).values.numpy()
    np.testing.assert_allclose(draft.confidences, expected, atol=1e-4)


def test_the_autoregressive_drafter_reproduces_two_rounds_of_the_dense_implementation(folder: Path) -> None:
    """Between the rounds the cache holds the entries of rejected drafts."""
    drafter = _drafter(folder, "autoregressive")
    steps, golden = Steps(drafter), load_file(folder / "draft_autoregressive" / "golden.safetensors")
    start = 0
    for name in ("r1", "r2"):
        features = drafter._model.project(golden[f"{name}_features"][0])
        tokens = golden[f"{name}_context_tokens"][0].tolist()
        draft = steps(Row("a", start, tokens, int(golden[f"{name}_anchor"]), features))["a"]
        assert draft.tokens.tolist() == golden[f"{name}_tokens"][0].tolist()
        expected = golden[f"{name}_base_logits"][0].softmax(-1).max(-1).values.numpy()
        np.testing.assert_allclose(draft.confidences, expected, atol=1e-4)
        start += len(tokens)


def test_q_travels_for_rejection_rows_only(folder: Path, head: str) -> None:
    steps = Steps(_drafter(folder, head, draft_top_k=8))
    drafts = steps(
        _row("greedy", 0, 4),
        _row("coupled", 0, 4, temperature=1.0, coupled=True),
        _row("rejection", 0, 4, temperature=1.0),
    )
    sampled = drafts["rejection"]
    assert sampled.q_ids is not None
    assert sampled.q_probs is not None
    assert sampled.q_ids.shape == (5, 8)
    np.testing.assert_allclose(sampled.q_probs.sum(-1), 1.0, atol=1e-5)
    drawn = sampled.q_ids == sampled.tokens[:, None]
    assert (drawn.sum(-1) == 1).all()
    assert (sampled.q_probs[drawn] > 0).all()
    for name in ("greedy", "coupled"):
        q_ids, q_probs = drafts[name].q_ids, drafts[name].q_probs
        assert q_ids is not None
        assert q_probs is not None
        assert not q_ids.any()
        assert not q_probs.any()
    steps(_row("greedy", 4, 1), _row("coupled", 4, 1, temperature=1.0, coupled=True))
    assert steps.last is not None
    assert steps.last.q_ids is None
    assert steps.last.q_probs is None


def test_sampled_drafts_vary_and_coupled_drafts_depend_on_the_seed_alone(folder: Path, head: str) -> None:
    sampled = {tuple(Steps(_drafter(folder, head))(_row("a", 0, 4, temperature=2.0))["a"].tokens) for _ in range(8)}
    coupled = {
        tuple(Steps(_drafter(folder, head))(_row("a", 0, 4, temperature=2.0, coupled=True, seed=seed))["a"].tokens)
        for seed in (1, 1, 1, 2)
    }
    assert len(sampled) > 4
    assert len(coupled) == 2


def test_calibration_rescales_confidences_and_not_drafts(folder: Path, head: str) -> None:
    plain = Steps(_drafter(folder, head))(_row("a", 0, 6))["a"]
    scaling = SequentialTemperatureScaling((2.0, 2.0, 2.0, 0.5, 0.5))
    scaled = Steps(_drafter(folder, head, calibration=ModeCalibration.of_all_modes(scaling)))(_row("a", 0, 6))["a"]
    assert scaled.tokens.tolist() == plain.tokens.tolist()
    logits = np.log(plain.confidences / (1 - plain.confidences))
    np.testing.assert_allclose(scaled.confidences, scaling.apply(logits), atol=1e-4)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_accepted_lengths_of_whole_generations_match_the_reference(golden_dir: Path, head: str) -> None:
    """A plain greedy loop with whole blocks of 7 over transformers' own forward pass."""
    record = json.loads((golden_dir / "golden.json").read_text())["heads"][head]["generations"]
    target = AutoModelForCausalLM.from_pretrained(golden_dir / "target_qwen3", dtype=torch.float32).eval()
    model = load_draft_model(str(golden_dir / f"draft_{head}"), None, dtype=torch.float32, device="cpu")
    steps = Steps(DSparkDrafter(model, num_draft_tokens=7, num_pages=64))
    for number, generation in enumerate(record[:3]):
        tokens, lengths = _speculate(target, model, steps, f"g{number}", generation["prompt"])
        assert tokens[: len(generation["output"])] == generation["output"]
        assert lengths[: len(generation["acceptance_lengths"]) - 1] == generation["acceptance_lengths"][:-1]


@torch.inference_mode()
def _speculate(
    target: torch.nn.Module, model: torch.nn.Module, steps: Steps, request_id: str, prompt: list[int], count: int = 64
) -> tuple[list[int], list[int]]:
    tokens, draft, lengths, start = list(prompt), [], [], 0
    while len(tokens) < len(prompt) + count:
        out = target(input_ids=torch.tensor([tokens + draft]), output_hidden_states=True)
        greedy = out.logits[0].argmax(-1).tolist()[len(tokens) - 1 :]
        accepted = next((k for k, token in enumerate(draft) if token != greedy[k]), len(draft))
        tokens += greedy[: accepted + 1]
        lengths += [accepted + 1] if draft else []
        committed = len(tokens) - 1
        taps = torch.cat([out.hidden_states[layer + 1][0] for layer in model.config.target_layer_ids], dim=-1)
        features = model.project(taps[start:committed])
        row = Row(request_id, start, tokens[start:committed], tokens[committed], features)
        draft, start = steps(row)[request_id].tokens.tolist(), committed
    return tokens[len(prompt) :], lengths


def test_lookup_prefers_the_longest_and_then_the_latest_match() -> None:
    tokens = np.array([1, 2, 3, 9, 9, 8, 2, 3, 7, 7, 1, 2, 3])
    assert lookup(tokens, 1, 3, 2).tolist() == [9, 9]  # 1 2 3 at the start beats the later 2 3
    assert lookup(tokens, 1, 2, 2).tolist() == [7, 7]  # of the two 2 3 the later
    assert lookup(tokens, 4, 4, 2) is None
    assert lookup(np.array([5]), 1, 4, 3) is None
    assert lookup(np.array([5, 6]), 1, 4, 3) is None


def test_lookup_goes_on_with_its_own_beginning_in_a_repetition() -> None:
    assert lookup(np.array([4, 4, 4]), 1, 4, 5).tolist() == [4] * 5
    assert lookup(np.array([1, 2, 3, 1, 2, 3, 1, 2]), 2, 4, 7).tolist() == [3, 1, 2, 3, 1, 2, 3]


def test_acceptance_counts_judged_positions_only() -> None:
    start = np.full(4, 0.5)
    moved = updated_acceptance(start, np.array([4, 2, 0]), np.array([1, 2, 0])) - start
    assert moved[0] > 0  # accepted twice
    assert abs(moved[1]) < 1e-12  # accepted once, rejected once
    assert moved[2:].tolist() == [0.0, 0.0]  # behind a rejection, or not admitted


def test_ngram_drafts_from_committed_tokens_the_anchor_and_given_histories() -> None:
    steps = Steps(NgramDrafter(num_draft_tokens=3, fallback_confidence=0.6))
    drafts = steps(Row("a", 0, [1, 2, 3, 4, 1], anchor=2), Row("b", 0, [1, 2, 3], anchor=4, drafts=False))
    assert drafts["a"].tokens.tolist() == [3, 4, 1]
    np.testing.assert_allclose(drafts["a"].confidences, 0.6)
    drafts = steps(Row("a", 5, [2, 9], anchor=9), Row("b", 3, [4, 2], anchor=3))
    assert list(drafts) == ["b"]  # a: nothing followed 9 9 before
    assert drafts["b"].tokens.tolist() == [4, 2, 3]
    moved = steps(Row("moved", 4, [5, 1], anchor=2), histories={"moved": np.array([7, 1, 2, 8])})
    assert moved["moved"].tokens.tolist() == [8, 5, 1]
    assert list(steps(Row("lost", 4, [5, 1], anchor=2))) == []


def test_ngram_ships_a_one_hot_q_for_rejection_rows() -> None:
    steps = Steps(NgramDrafter(num_draft_tokens=2))
    history = [3, 4, 5, 3]
    drafts = steps(Row("a", 0, history, 4, temperature=1.0), Row("b", 0, history, 4, temperature=1.0, coupled=True))
    assert drafts["a"].q_ids is not None
    assert drafts["a"].q_probs is not None
    assert drafts["a"].q_ids.tolist() == [[5], [3]]
    assert drafts["a"].q_probs.tolist() == [[1.0], [1.0]]
    assert drafts["b"].q_probs is not None
    assert drafts["b"].q_probs.tolist() == [[0.0], [0.0]]


def test_ngram_confidence_follows_acceptance_not_the_token() -> None:
    steps = Steps(NgramDrafter(num_draft_tokens=2, fallback_confidence=0.5))
    for _ in range(50):
        steps(Row("a", 0, [1, 2, 1], anchor=2, num_admitted=2, num_accepted=1))
    drafts = steps(Row("a", 0, [1, 2, 1], anchor=2), Row("b", 0, [5, 6, 5], anchor=6))
    assert drafts["a"].confidences[0] > 0.8
    assert drafts["a"].confidences[1] < 0.2
    assert drafts["b"].confidences.tolist() == drafts["a"].confidences.tolist()


def _config(folder: Path, **drafter: object) -> AppConfig:
    return AppConfig.model_validate(
        {
            "target": {"model": str(folder / "target"), "dtype": "float32"},
            "drafter": {"dtype": "float32", "device": "cpu", **drafter},
            "engine": {"page_size": 4, "max_num_seqs": 4},
        }
    )


def test_a_draft_model_drafts_its_own_greedy_continuation(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    drafter = build_drafter(_config(folder, kind="draft_model", model=str(folder / "target"), num_draft_tokens=4))
    assert drafter is not None
    steps = Steps(drafter)
    prompts = {"a": [1, 2, 3, 4, 5, 6], "b": [60, 10, 20], "c": [9, 9, 8, 7]}

    def continuation(tokens: list[int]) -> list[int]:
        out = model.generate(
            torch.tensor([tokens]), max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        return out[0, len(tokens) :].tolist()

    histories = {"c": np.array(prompts["c"][:2])}
    first = steps(
        Row("a", 0, prompts["a"][:5], 6),
        Row("b", 0, prompts["b"], 0, drafts=False),
        Row("c", 2, prompts["c"][2:3], 7),
        histories=histories,
    )
    assert first["a"].tokens.tolist() == continuation(prompts["a"])
    assert first["c"].tokens.tolist() == continuation(prompts["c"])  # its past came as a history
    assert "b" not in first
    committed = [6, *first["a"].tokens[:2]]  # two drafts accepted, then another token
    second = steps(Row("a", 5, committed, 33), Row("b", 3, [], 44))
    assert second["a"].tokens.tolist() == continuation([*prompts["a"][:5], *committed, 33])
    assert second["b"].tokens.tolist() == continuation([*prompts["b"], 44])
    assert ((second["a"].confidences > 0) & (second["a"].confidences <= 1)).all()


def test_the_factory_builds_every_kind(folder: Path) -> None:
    assert build_drafter(_config(folder, kind="none")) is None
    for kind, name, expected in (
        ("dspark", "draft_rnn", 5),
        ("dflash", "draft_dflash", 4),
        ("autoregressive", "draft_autoregressive", 5),
        ("ngram", None, 4),
    ):
        drafter = build_drafter(_config(folder, kind=kind, model=name and str(folder / name)))
        assert drafter is not None
        assert drafter.num_draft_tokens == expected
    with pytest.raises(ConfigError, match="num_draft_tokens is 9"):
        build_drafter(_config(folder, kind="dspark", model=str(folder / "draft_rnn"), num_draft_tokens=9))
    for kind, name in (("dspark", "draft_autoregressive"), ("autoregressive", "draft_rnn")):
        with pytest.raises(ConfigError, match=r"set drafter\.kind to"):
            build_drafter(_config(folder, kind=kind, model=str(folder / name)))
    with pytest.raises(ConfigError, match="no confidences to calibrate"):
        build_drafter(_config(folder, kind="ngram", calibration="calibration.json"))


def test_a_draft_model_of_another_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "target", tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text()) | {"vocab_size": 65}
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="vocabulary of 65 tokens, its target one of 64"):
        build_drafter(_config(folder, kind="draft_model", model=str(tmp_path / "other")))


def test_calibration_is_found_beside_the_checkpoint_and_its_absence_is_said_once(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(folder / "draft_rnn", tmp_path / "drafter")
    config = _config(folder, kind="dspark", model=str(tmp_path / "drafter"))
    with caplog.at_level(logging.WARNING):
        plain = build_drafter(config)
    assert [record.message for record in caplog.records if "not calibrated" in record.message]
    SequentialTemperatureScaling((4.0,) * 5).save(tmp_path / "drafter" / "calibration.json")
    scaled = build_drafter(config)
    assert plain is not None
    assert scaled is not None
    rough, smooth = (Steps(drafter)(_row("a", 0, 5))["a"].confidences for drafter in (plain, scaled))
    assert (np.abs(smooth - 0.5) <= np.abs(rough - 0.5)).all()
    SequentialTemperatureScaling((4.0,) * 3).save(tmp_path / "drafter" / "calibration.json")
    with pytest.raises(ConfigError, match="covers 3 draft positions, but 5 are drafted"):
        build_drafter(config)
