"""The configuration tree refuses what it does not know and what cannot be, each by name."""

import pickle

import pytest
import yaml
from pydantic import ValidationError

from dspark_ray.config import AppConfig, TargetConfig


def test_the_defaults_are_the_demo() -> None:
    config = AppConfig()
    assert config.target.model == "smollm2-135m-instruct"
    assert (config.drafter.kind, config.verification.policy) == ("dspark", "adaptive")


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"tarrget": {}}, "tarrget"),
        ({"target": {"modle": "x"}}, "target.modle"),
        ({"drafter": {"num_draft_token": 3}}, "drafter.num_draft_token"),
        ({"verification.polcy": "static"}, "verification.polcy"),
        ({"engine": {"page_size": 16, "pages": 3}}, "engine.pages"),
        ({"serving.max_m": 1}, "serving.max_m"),
    ],
)
def test_an_unknown_key_is_refused_by_name(data: dict[str, object], key: str) -> None:
    with pytest.raises(ValidationError) as caught:
        AppConfig.model_validate(data)
    errors = caught.value.errors()
    assert [".".join(map(str, error["loc"])) for error in errors] == [key]
    assert errors[0]["type"] == "extra_forbidden"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("target.tensor_parallel_size", 0),
        ("target.dtype", "int8"),
        ("drafter.kind", "medusa"),
        ("drafter.num_draft_tokens", 33),
        ("verification.policy", "always"),
        ("verification.threshold", 1.5),
        ("verification.threshold", float("nan")),
        ("engine.kv_memory_fraction", 0.0),
        ("engine.max_num_seqs", "many"),
    ],
)
def test_a_value_out_of_range_is_refused_by_the_name_of_its_field(key: str, value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        AppConfig.model_validate({key: value})
    assert {".".join(map(str, error["loc"])) for error in caught.value.errors()} == {key}


def test_ngram_bounds_must_be_in_order() -> None:
    with pytest.raises(ValidationError, match=r"ngram_min \(5\) must not exceed ngram_max \(4\)"):
        AppConfig.model_validate({"drafter.ngram_min": 5})


def test_dotted_keys_and_sections_mix_and_strings_are_parsed() -> None:
    flat = {"drafter.kind": "ngram", "drafter.ngram_max": "6", "engine.page_size": "32"}
    config = AppConfig.model_validate({"drafter": {"ngram_min": 3}, **flat})
    assert (config.drafter.kind, config.drafter.ngram_min, config.drafter.ngram_max) == ("ngram", 3, 6)
    assert config.engine.page_size == 32


def test_a_configuration_survives_yaml_and_pickle() -> None:
    config = AppConfig.model_validate({"target.model": "org/big", "verification.policy": "static"})
    assert AppConfig.model_validate(yaml.safe_load(yaml.safe_dump(config.model_dump()))) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_configuration_cannot_be_changed_once_made() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        AppConfig().target.model = "other"


@pytest.mark.parametrize(
    ("model", "served", "name"),
    [("org/big-7b", None, "big-7b"), ("/models/big/", None, "big"), ("org/big", "mine", "mine")],
)
def test_the_served_name_is_the_last_part_of_the_model_unless_given(model: str, served: str | None, name: str) -> None:
    assert TargetConfig(model=model, served_model_name=served).name == name
