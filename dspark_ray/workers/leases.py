"""Who may use which drafter: a pure function from the present leases, loads and capacities to the next leases.

Every group gets at least one drafter while there is any; drafters are shared only where groups outnumber them; leases
move only when that evens the load noticeably, since a moved request costs its new drafter a fresh start.
"""

from collections.abc import Mapping

KEEP_RATIO = 1.3  # leases stay unless the heaviest load per drafter would fall by more than this factor

Leases = dict[str, tuple[str, ...]]  # drafter ids by group


def assign_leases(
    current: Mapping[str, tuple[str, ...]], loads: Mapping[str, float], capacities: Mapping[str, float]
) -> Leases:
    """The next leases.

    Args:
        current: leases in force; may name groups and drafters that are gone.
        loads: by living group, any unit (requests); less than 1 counts as 1.
        capacities: by living drafter, any unit; only ratios count.
    """
    weights = {group: max(1.0, load) for group, load in loads.items()}
    if not capacities:
        return {group: () for group in weights}
    if len(capacities) >= len(weights):
        return _exclusive(current, weights, capacities)
    return _shared(current, weights, capacities)


def _exclusive(
    current: Mapping[str, tuple[str, ...]], weights: Mapping[str, float], capacities: Mapping[str, float]
) -> Leases:
    """As many drafters as groups or more: each drafter serves one group."""
    counts = _lease_counts(current, weights, capacities)
    taken: set[str] = set()
    leases: dict[str, list[str]] = {}
    for group in sorted(weights):
        held = [drafter for drafter in current.get(group, ()) if drafter in capacities and drafter not in taken]
        leases[group] = held[: counts[group]]
        taken |= set(leases[group])
    free = sorted(set(capacities) - taken, key=lambda drafter: (-capacities[drafter], drafter))
    for group in sorted(weights, key=lambda group: (len(leases[group]) - counts[group], group)):
        missing = counts[group] - len(leases[group])
        leases[group] += free[:missing]
        free = free[missing:]
    return {group: tuple(held) for group, held in leases.items()}


def _lease_counts(
    current: Mapping[str, tuple[str, ...]], weights: Mapping[str, float], capacities: Mapping[str, float]
) -> dict[str, int]:
    """Drafters for each group, all used, the heaviest load per drafter least; today's counts if they are near that."""
    if not weights:
        return {}
    counts = dict.fromkeys(weights, 1)
    for _ in range(len(capacities) - len(weights)):
        counts[max(sorted(weights), key=lambda group: weights[group] / counts[group])] += 1
    today = {group: sum(drafter in capacities for drafter in current.get(group, ())) for group in weights}
    if sum(today.values()) != len(capacities) or not all(today.values()):
        return counts
    return today if _heaviest(weights, today) <= KEEP_RATIO * _heaviest(weights, counts) else counts


def _heaviest(weights: Mapping[str, float], counts: Mapping[str, int]) -> float:
    return max(weight / counts[group] for group, weight in weights.items())


def _shared(
    current: Mapping[str, tuple[str, ...]], weights: Mapping[str, float], capacities: Mapping[str, float]
) -> Leases:
    """Fewer drafters than groups: each group has one, heavy groups placed first, then moved only where it pays."""
    holder: dict[str, str] = {}
    load = dict.fromkeys(sorted(capacities), 0.0)

    def put(group: str, drafter: str) -> None:
        if group in holder:
            load[holder[group]] -= weights[group] / capacities[holder[group]]
        holder[group] = drafter
        load[drafter] += weights[group] / capacities[drafter]

    for group in sorted(weights):
        held = [drafter for drafter in current.get(group, ()) if drafter in capacities]
        if held:
            put(group, held[0])
    for group in sorted(weights.keys() - holder.keys(), key=lambda group: (-weights[group], group)):
        put(group, min(load, key=lambda drafter: load[drafter] + weights[group] / capacities[drafter]))
    for _ in weights:
        move = _best_move(holder, load, weights, capacities)
        if move is None:
            break
        put(*move)
    return {group: (drafter,) for group, drafter in holder.items()}


def _best_move(
    holder: Mapping[str, str], load: Mapping[str, float], weights: Mapping[str, float], capacities: Mapping[str, float]
) -> tuple[str, str] | None:
    """(group, drafter) of a move off the heaviest drafter it can relieve by KEEP_RATIO, or None."""
    target = min(load, key=lambda drafter: load[drafter])
    for source in sorted(load, key=lambda drafter: (-load[drafter], drafter)):
        for group in sorted((g for g, d in holder.items() if d == source), key=lambda g: (-weights[g], g)):
            left = load[source] - weights[group] / capacities[source]
            gained = load[target] + weights[group] / capacities[target]
            if source != target and KEEP_RATIO * max(left, gained) <= load[source]:
                return group, target
    return None
