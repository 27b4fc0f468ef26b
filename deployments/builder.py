"""Composes the Serve application. The one place that knows every deployment; starts and loads nothing.

Deployment names are API: configuration files override deployments by name.
"""

# No `from __future__ import annotations` here: Serve reads the builder's annotation to validate its arguments.
from pathlib import Path

import ray
from ray import serve
from ray.serve import Application, Deployment

from deployments.controller import ControllerServer
from deployments.drafter import DrafterServer
from deployments.ingress import Ingress
from deployments.target import TargetServer
from dspark_ray.config import AppConfig, DrafterConfig
from dspark_ray.workers.placement import LEAST_CPUS, choose_device, rank_bundle

# Room above our own limits, so that the answer beyond them is our 429 in OpenAI's JSON and not Serve's plain text.
HEADROOM = 64

# An ingress or controller imports no torch; and an actor without GPUs would see them all.
NO_GPU = {"num_cpus": 0, "num_gpus": 0, "runtime_env": {"env_vars": {"CUDA_VISIBLE_DEVICES": ""}}}

# The target replica must not blank its GPUs: its ranks inherit its environment.
NO_CPU = {"num_cpus": 0, "num_gpus": 0}

# A replica that is to go waits so long for its streams; the ingress continues those a target replica could not end.
DRAIN_SECONDS = 60
DRAIN_POLL_SECONDS = 0.2

NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


def build_app(args: AppConfig) -> Application:
    """The application of a configuration; what Serve calls with the `args` of a YAML or of `serve run`."""
    config = with_target_device(args)
    controller = _controller().bind(config)
    drafters = None if config.drafter.kind == "none" else _drafters(config).bind(config)
    targets = _targets(config).bind(config, controller, drafters)
    return _ingress(config).bind(config, targets, controller)


def _ingress(config: AppConfig) -> Deployment:
    return serve.deployment(
        name="Ingress",
        num_replicas=config.serving.num_ingress_replicas,
        max_ongoing_requests=config.serving.max_ongoing_requests + HEADROOM,
        max_queued_requests=config.serving.max_queued_requests,
        health_check_period_s=5,
        health_check_timeout_s=15,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_SECONDS,
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
        ray_actor_options=NO_GPU,
    )(Ingress)


def _targets(config: AppConfig) -> Deployment:
    target = config.target
    return serve.deployment(
        name="TargetServer",
        num_replicas=target.num_replicas,
        max_ongoing_requests=config.engine.max_queued + HEADROOM,
        max_queued_requests=config.serving.max_queued_requests,
        health_check_period_s=2,
        health_check_timeout_s=15,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_SECONDS,
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
        max_constructor_retry_count=3,
        placement_group_bundles=[rank_bundle(target, target.device)] * target.tensor_parallel_size,
        placement_group_strategy="PACK",
        ray_actor_options=NO_CPU,
    )(TargetServer)


def _drafters(config: AppConfig) -> Deployment:
    return serve.deployment(
        name="DrafterServer",
        num_replicas=config.drafter.num_replicas,
        max_ongoing_requests=HEADROOM,
        max_queued_requests=HEADROOM,
        health_check_period_s=2,
        health_check_timeout_s=15,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_SECONDS,
        graceful_shutdown_timeout_s=5,
        max_constructor_retry_count=3,
        placement_group_bundles=[drafter_bundle(config.drafter)],
        placement_group_strategy="PACK",
        ray_actor_options=NO_CPU,
    )(DrafterServer)


def _controller() -> Deployment:
    return serve.deployment(
        name="ControllerServer",
        num_replicas=1,
        max_ongoing_requests=HEADROOM,
        max_queued_requests=HEADROOM,
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_SECONDS,
        graceful_shutdown_timeout_s=5,
        ray_actor_options=NO_GPU,
    )(ControllerServer)


def drafter_bundle(config: DrafterConfig) -> dict[str, float]:
    """What one DraftWorker reserves, beside the replica that owns it."""
    bundle = {"CPU": max(config.num_cpus, LEAST_CPUS)}
    return {**bundle, "GPU": config.num_gpus} if config.num_gpus else bundle


def with_target_device(config: AppConfig) -> AppConfig:
    """Settle `target.device: auto` now, because the bundles depend on it: cuda where every rank finds a GPU.

    Counts the cluster's GPUs if this process is connected to one, else this machine's. A cluster that has no GPU
    yet (autoscaling from zero) needs an explicit `cuda`.
    """
    target = config.target
    gpus = ray.cluster_resources() if ray.is_initialized() else {"GPU": float(num_local_gpus())}
    device = choose_device(target.device, gpus, target.tensor_parallel_size * target.num_replicas)
    return config.model_copy(update={"target": target.model_copy(update={"device": device})})


def num_local_gpus() -> int:
    """NVIDIA GPUs of this machine, counted without importing torch."""
    return len(list(NVIDIA_GPUS.iterdir())) if NVIDIA_GPUS.is_dir() else 0
