"""What the composed application asks of Serve, without starting it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from ray.serve import Application, Deployment
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve.schema import ServeDeploySchema

import deployments
from deployments.builder import build_app, drafter_bundle
from dspark_ray.config import AppConfig, DrafterConfig

ROOT = Path(__file__).resolve().parents[2]


def deployments_of(app: Application) -> dict[str, Deployment]:
    """Every deployment reachable from the ingress, by name."""
    deployment = app._bound_deployment
    found = {deployment.name: deployment}
    for argument in deployment.init_args:
        if isinstance(argument, Application):
            found |= deployments_of(argument)
    return found


def build(**sections: dict[str, Any]) -> dict[str, Deployment]:
    return deployments_of(build_app(AppConfig.model_validate(sections)))


def test_the_four_deployments_have_their_names() -> None:
    assert sorted(build()) == ["ControllerServer", "DrafterServer", "Ingress", "TargetServer"]


def test_without_a_drafter_no_drafter_pool_is_deployed() -> None:
    assert sorted(build(drafter={"kind": "none"})) == ["ControllerServer", "Ingress", "TargetServer"]


def test_limits_and_health_checks_are_explicit_everywhere() -> None:
    for deployment in build().values():
        config = deployment._deployment_config
        explicit = config.user_configured_option_names
        assert {"max_ongoing_requests", "max_queued_requests", "health_check_period_s"} <= explicit, deployment.name
        assert config.max_queued_requests > 0


def test_serves_own_limits_lie_above_ours_so_that_ours_answer() -> None:
    found = build(serving={"max_ongoing_requests": 10}, engine={"max_queued": 20})
    assert found["Ingress"].max_ongoing_requests > 10
    assert found["TargetServer"].max_ongoing_requests > 20


def test_ranks_get_a_bundle_each_and_replicas_take_no_cpu() -> None:
    found = build(target={"tensor_parallel_size": 3, "num_cpus": 1.5, "device": "cpu"}, drafter={"num_replicas": 4})
    target = found["TargetServer"]._replica_config
    assert target.placement_group_bundles == [{"CPU": 1.5}] * 3
    assert target.placement_group_strategy == "PACK"
    assert found["DrafterServer"].num_replicas == 4
    for deployment in found.values():
        assert deployment.ray_actor_options["num_cpus"] == 0


def test_on_gpus_every_rank_reserves_one_and_drafters_what_is_configured() -> None:
    found = build(target={"tensor_parallel_size": 2, "device": "cuda"}, drafter={"num_gpus": 0.5})
    assert found["TargetServer"]._replica_config.placement_group_bundles == [{"CPU": 1.0, "GPU": 1.0}] * 2
    assert drafter_bundle(DrafterConfig(num_gpus=0.5)) == {"CPU": 0.25, "GPU": 0.5}


def test_ingress_and_controller_see_no_gpu_but_the_target_replica_may() -> None:
    found = build()
    for name in ("Ingress", "ControllerServer"):
        assert found[name].ray_actor_options["runtime_env"]["env_vars"] == {"CUDA_VISIBLE_DEVICES": ""}
    assert "runtime_env" not in found["TargetServer"].ray_actor_options


def test_unknown_keys_are_refused_by_name() -> None:
    with pytest.raises(ValidationError, match="num_replcas"):
        AppConfig.model_validate({"target": {"num_replcas": 2}})


def test_the_command_lines_flat_keys_reach_their_sections() -> None:
    arguments = {"drafter.kind": "none", "target.tensor_parallel_size": "2", "target.device": "cpu"}
    found = deployments_of(call_user_app_builder_with_args_if_necessary(build_app, arguments))
    assert "DrafterServer" not in found
    assert len(found["TargetServer"]._replica_config.placement_group_bundles) == 2
    with pytest.raises(ValidationError, match=r"drafter\.knd"):
        call_user_app_builder_with_args_if_necessary(build_app, {"drafter.knd": "none"})


def test_the_package_offers_an_application_and_a_builder() -> None:
    for _ in range(2):
        assert isinstance(deployments.app, Application)
    assert deployments.build_app is build_app
    assert build_app.__annotations__["args"] is AppConfig


def test_importing_and_building_import_no_torch_and_start_no_ray() -> None:
    code = (
        "import sys, deployments; deployments.app; import ray; sys.exit('torch' in sys.modules or ray.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_serve_build_writes_a_configuration() -> None:
    command = [str(Path(sys.executable).with_name("serve")), "build", "deployments:app"]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    written = done.stdout[done.stdout.index("proxy_location") :]
    built = ServeDeploySchema.model_validate(yaml.safe_load(written))
    assert built.applications[0].import_path == "deployments:app"
    assert len(built.applications[0].deployments) == 4


def test_the_shipped_configuration_is_valid_and_names_only_what_exists() -> None:
    text = (ROOT / "deployments" / "serve_config.yaml").read_text()
    application = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications[0]
    assert (application.name, application.import_path) == ("dspark", "deployments:build_app")
    found = deployments_of(build_app(AppConfig.model_validate(application.args)))
    assert {override.name for override in application.deployments} <= found.keys()
