"""The engines of the corpus stage as Ray actors: each with target ranks in a placement group of its own."""

import uuid

from dspark_ray.training.corpus import TargetPool
from dspark_ray.workers.ray_executor import RayExecutor

APP_NAME = "dspark-ray-train"


def ray_target_pool(num_engines: int) -> TargetPool:
    """Needs an initialised Ray with room for `num_engines` target groups."""
    return TargetPool(lambda config: RayExecutor(config, APP_NAME, uuid.uuid4().hex[:8]), num_engines)
