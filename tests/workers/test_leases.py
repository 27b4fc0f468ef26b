"""Leases: everyone served, everything used, balanced, and still."""

from collections import Counter

import numpy as np
import pytest

from dspark_ray.workers.leases import Leases, assign_leases


def capacities(count: int) -> dict[str, float]:
    return {f"d{index}": 1.0 for index in range(count)}


def loads(*values: float) -> dict[str, float]:
    return {f"g{index}": value for index, value in enumerate(values)}


def shares(leases: Leases) -> Counter[str]:
    return Counter(drafter for held in leases.values() for drafter in held)


@pytest.mark.parametrize("num_groups", [1, 2, 3, 7])
@pytest.mark.parametrize("num_drafters", [1, 2, 3, 7])
def test_every_group_has_a_drafter_and_every_drafter_a_group(num_groups: int, num_drafters: int) -> None:
    leases = assign_leases({}, loads(*range(num_groups)), capacities(num_drafters))
    assert all(leases[f"g{index}"] for index in range(num_groups))
    assert set(shares(leases)) == set(capacities(num_drafters))


def test_without_drafters_every_group_has_none() -> None:
    assert assign_leases({"g0": ("gone",)}, loads(5, 1), {}) == {"g0": (), "g1": ()}


def test_without_groups_there_are_no_leases() -> None:
    assert assign_leases({"gone": ("d0",)}, {}, capacities(2)) == {}


def test_drafters_are_divided_in_proportion_to_load() -> None:
    leases = assign_leases({}, loads(60, 20, 20), capacities(5))
    assert [len(leases[group]) for group in ("g0", "g1", "g2")] == [3, 1, 1]
    assert max(shares(leases).values()) == 1


def test_an_idle_group_keeps_one_drafter() -> None:
    assert len(assign_leases({}, loads(1000, 0), capacities(4))["g1"]) == 1


def test_groups_share_drafters_evenly_when_they_outnumber_them() -> None:
    assert sorted(shares(assign_leases({}, loads(*[10] * 6), capacities(3))).values()) == [2, 2, 2]


def test_a_heavy_group_shares_its_drafter_with_nobody() -> None:
    leases = assign_leases({}, loads(100, 1, 1, 1), capacities(2))
    assert shares(leases)[leases["g0"][0]] == 1


def test_a_larger_drafter_serves_more_groups() -> None:
    leases = assign_leases({}, loads(*[10] * 4), {"big": 3.0, "small": 1.0})
    assert shares(leases) == {"big": 3, "small": 1}


def test_small_changes_of_load_move_nothing() -> None:
    before = assign_leases({}, loads(50, 50), capacities(6))
    assert assign_leases(before, loads(60, 45), capacities(6)) == before


def test_a_large_change_of_load_moves_as_few_drafters_as_it_needs() -> None:
    before = assign_leases({}, loads(50, 50), capacities(6))
    after = assign_leases(before, loads(200, 20), capacities(6))
    assert len(after["g0"]) == 5
    assert set(before["g0"]) < set(after["g0"])
    assert set(after["g1"]) < set(before["g1"])


def test_a_lost_drafter_costs_only_its_group_while_others_are_balanced() -> None:
    before = assign_leases({}, loads(10, 10, 10), capacities(6))
    lost = before["g0"][0]
    after = assign_leases(before, loads(10, 10, 10), {d: 1.0 for d in capacities(6) if d != lost})
    assert after["g0"]
    assert sum(len(held) for held in after.values()) == 5
    kept = sum(len(set(before[group]) & set(after[group])) for group in before)
    assert kept == 5


def test_a_group_whose_only_drafter_dies_takes_one_from_a_group_with_two() -> None:
    current = {"g0": ("d0",), "g1": ("d1", "d2")}
    after = assign_leases(current, loads(5, 5), {"d1": 1.0, "d2": 1.0})
    assert len(after["g0"]) == len(after["g1"]) == 1
    assert after["g1"][0] in ("d1", "d2")


def test_a_new_drafter_relieves_the_most_crowded_one() -> None:
    before = assign_leases({}, loads(10, 10, 10, 10), capacities(1))
    after = assign_leases(before, loads(10, 10, 10, 10), capacities(2))
    assert sorted(shares(after).values()) == [2, 2]


def test_the_same_question_twice_has_the_same_answer() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        num_groups, num_drafters = rng.integers(1, 9, 2)
        load = loads(*rng.integers(0, 100, num_groups).tolist())
        capacity = {f"d{index}": float(value) for index, value in enumerate(rng.uniform(1, 4, num_drafters))}
        leases = assign_leases({}, load, capacity)
        assert assign_leases(leases, load, capacity) == leases
        assert set(shares(leases)) == set(capacity)
