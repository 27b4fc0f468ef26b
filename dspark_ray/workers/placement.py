"""Where the ranks of a target group run: bundles of one placement group, packed. Knows nothing of models or steps."""

import asyncio
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dspark_ray.config import TargetConfig
from dspark_ray.errors import PlacementError

LEAST_CPUS = 0.01  # Ray refuses an empty bundle


@dataclass(frozen=True, slots=True)
class GroupPlacement:
    """The bundles of one target group; rank i runs in bundle i."""

    group: PlacementGroup
    owned: bool  # made here and removed on release; otherwise the Serve replica's own
    device: str  # "cpu" or "cuda"


def choose_device(device: str, resources: dict[str, float], num_ranks: int) -> str:
    """`auto`: cuda if there is a GPU for every rank, else cpu."""
    if device != "auto":
        return device
    return "cuda" if resources.get("GPU", 0) >= num_ranks else "cpu"


def rank_bundle(config: TargetConfig, device: str) -> dict[str, float]:
    """What one rank reserves. A GPU is reserved whole: without it the rank would see no device in the group."""
    bundle = {"CPU": max(config.num_cpus, LEAST_CPUS)}
    return {**bundle, "GPU": 1.0} if device == "cuda" else bundle


async def place_group(config: TargetConfig) -> GroupPlacement:
    """The placement group this process runs in (a Serve replica's), or else a new one; waits until it is placed.

    Raises PlacementError, with what was asked and what each node has, if that takes longer than
    `placement_timeout_seconds` or if the surrounding group is too small. Never nests one group in another.
    """
    current = get_current_placement_group()
    num_ranks = config.tensor_parallel_size
    if current is not None:
        bundles = current.bundle_specs[:num_ranks]
        device = choose_device(config.device, _sum(bundles), num_ranks)
        check_bundles(current.bundle_specs, num_ranks, device)
        placement = GroupPlacement(current, False, device)
    else:
        device = choose_device(config.device, ray.cluster_resources(), num_ranks)
        group = placement_group([rank_bundle(config, device)] * num_ranks, strategy="PACK")
        placement = GroupPlacement(group, True, device)
    await wait_placed(placement, config)
    return placement


def check_bundles(bundles: list[dict[str, float]], num_ranks: int, device: str) -> None:
    """Raise PlacementError unless there is a bundle for every rank, with a GPU each if the device is cuda."""
    if len(bundles) < num_ranks:
        raise PlacementError(
            f"the surrounding placement group has {len(bundles)} bundle(s), but tensor_parallel_size {num_ranks} needs "
            f"one for each rank: {bundles}"
        )
    without = [index for index, bundle in enumerate(bundles[:num_ranks]) if bundle.get("GPU", 0) < 1]
    if device == "cuda" and without:
        raise PlacementError(
            f"target.device is cuda, but bundles {without} of the surrounding placement group have no GPU: {bundles}"
        )


async def wait_placed(placement: GroupPlacement, config: TargetConfig) -> None:
    """Wait for the bundles (again after a node was lost); on time-out release what we made and raise PlacementError."""
    seconds = config.placement_timeout_seconds
    if await asyncio.to_thread(placement.group.wait, seconds):
        return
    release(placement)
    raise PlacementError(
        f"could not place {config.tensor_parallel_size} rank(s) as bundles {placement.group.bundle_specs} (PACK) "
        f"within {seconds:g} s. {describe_cluster()} Lower target.tensor_parallel_size or num_cpus, add nodes, "
        "or raise target.placement_timeout_seconds."
    )


def describe_cluster() -> str:
    """One line: what each node has, and what is free in the cluster."""
    nodes = "; ".join(
        f"{node['NodeManagerAddress']}: {_resources(node['Resources'])}" for node in ray.nodes() if node["Alive"]
    )
    return f"Nodes have [{nodes}]; free now: {_resources(ray.available_resources())}."


def rank_options(
    placement: GroupPlacement, config: TargetConfig, rank: int, name: str, namespace: str
) -> dict[str, Any]:
    """Actor options of one rank. A dead rank is never restarted alone: its group is rebuilt whole."""
    return {
        "name": name,
        "namespace": namespace,
        "num_cpus": config.num_cpus,
        "num_gpus": 1 if placement.device == "cuda" else 0,
        "max_restarts": 0,
        "max_task_retries": 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(placement.group, placement_group_bundle_index=rank),
        "runtime_env": {"env_vars": thread_env(config.num_threads, sees_gpus=placement.device == "cuda")},
    }


def thread_env(num_threads: int, *, sees_gpus: bool) -> dict[str, str]:
    """Environment of a worker process: OpenMP threads that sleep when idle, and no GPU where none was reserved.

    Spinning OpenMP threads of two processes on the same cores slow both several-fold; and an actor with zero GPUs
    would otherwise see every GPU of its node.
    """
    env = {"OMP_NUM_THREADS": str(num_threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return env if sees_gpus else {**env, "CUDA_VISIBLE_DEVICES": ""}


def release(placement: GroupPlacement) -> None:
    """Remove the placement group if it was made here."""
    if placement.owned:
        remove_placement_group(placement.group)


def _resources(resources: dict[str, float]) -> str:
    shown = {name: resources[name] for name in ("CPU", "GPU") if name in resources}
    return " ".join(f"{name} {amount:g}" for name, amount in shown.items()) or "nothing"


def _sum(bundles: list[dict[str, float]]) -> dict[str, float]:
    return {"GPU": sum(bundle.get("GPU", 0.0) for bundle in bundles)}
