"""The Protocol every drafter implements: one call a step for all its requests, state keyed by request id."""

from typing import Protocol

from dspark_ray.algorithm.proposal import DraftBatch
from dspark_ray.engine.batch import DraftPlan, FeatureBatch


class Drafter(Protocol):
    """Proposes draft blocks. Losing its state (restart, new lease, dropped request) may cost quality, never output.

    `num_draft_tokens` is K. A request it has never seen is drafted for from what this step brings.
    """

    @property
    def num_draft_tokens(self) -> int: ...

    def propose(self, plan: DraftPlan, features: FeatureBatch) -> DraftBatch: ...
