"""`dspark-ray demo-model`: the demo model in the cache, made if need be."""

from argparse import Namespace

from dspark_ray.config import DEMO_MODEL
from dspark_ray.models.resolve import resolve_model


def run(args: Namespace) -> int:
    print(resolve_model(DEMO_MODEL))
    return 0
