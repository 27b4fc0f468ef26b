"""Placement: what is asked of the cluster, and a clear error where it cannot be had."""

import asyncio

import pytest
import ray
from ray.util import placement_group_table

from dspark_ray.config import TargetConfig
from dspark_ray.errors import PlacementError
from dspark_ray.workers.placement import check_bundles, choose_device, place_group, rank_bundle, thread_env


def test_auto_chooses_cuda_only_if_every_rank_gets_a_gpu() -> None:
    assert choose_device("auto", {"CPU": 8, "GPU": 2}, 2) == "cuda"
    assert choose_device("auto", {"CPU": 8, "GPU": 1}, 2) == "cpu"
    assert choose_device("cpu", {"GPU": 8}, 1) == "cpu"


def test_a_rank_on_cuda_reserves_a_whole_gpu() -> None:
    assert rank_bundle(TargetConfig(num_cpus=2), "cuda") == {"CPU": 2, "GPU": 1.0}
    assert "GPU" not in rank_bundle(TargetConfig(), "cpu")
    assert rank_bundle(TargetConfig(num_cpus=0), "cpu")["CPU"] > 0, "Ray refuses an empty bundle"


def test_a_surrounding_group_that_is_too_small_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"1 bundle.*tensor_parallel_size 2"):
        check_bundles([{"CPU": 1}], 2, "cpu")


def test_a_surrounding_group_without_gpus_is_refused_for_cuda() -> None:
    with pytest.raises(PlacementError, match=r"bundles \[1\].*have no GPU"):
        check_bundles([{"CPU": 1, "GPU": 1}, {"CPU": 1}], 2, "cuda")
    check_bundles([{"CPU": 1}, {"CPU": 1}], 2, "cpu")


def test_a_process_without_gpus_sees_none_and_its_threads_sleep_when_idle() -> None:
    env = thread_env(3, sees_gpus=False)
    assert env == {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}
    assert "CUDA_VISIBLE_DEVICES" not in thread_env(3, sees_gpus=True)


@pytest.mark.ray
def test_what_cannot_be_placed_is_an_error_that_lists_the_cluster_and_leaves_no_group(local_ray: None) -> None:
    config = TargetConfig(tensor_parallel_size=2, num_cpus=1000, device="cpu", placement_timeout_seconds=0.5)
    with pytest.raises(PlacementError, match=r"2 rank\(s\).*1000.*Nodes have \[.*CPU 8.*free now.*placement_timeout"):
        asyncio.run(place_group(config))
    assert all(group["state"] == "REMOVED" for group in placement_group_table().values())


@pytest.mark.ray
def test_inside_a_placement_group_it_is_used_and_no_other_is_made(local_ray: None) -> None:
    @ray.remote(num_cpus=0)
    class Replica:
        async def place(self) -> tuple[bool, str, str]:
            placement = await place_group(TargetConfig(tensor_parallel_size=2, num_cpus=0.5))
            return placement.owned, placement.device, placement.group.id.hex()

    group = ray.util.placement_group([{"CPU": 0.5}, {"CPU": 0.5}], strategy="PACK")
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        group, placement_group_capture_child_tasks=True
    )
    replica = Replica.options(scheduling_strategy=strategy).remote()
    assert ray.get(replica.place.remote(), timeout=60) == (False, "cpu", group.id.hex())
    ray.kill(replica)
    ray.util.remove_placement_group(group)
