"""The Serve application: `serve run deployments:app`, or `deployments:build_app` with arguments.

Both are made when first asked for, so that importing one part (say, the protocol) costs neither ray nor a model.
No module here may be called `app`: it would take the application's place.
"""

from importlib import import_module
from typing import Any

from dspark_ray.config import AppConfig

__all__ = ["app", "build_app"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    build_app = import_module("deployments.builder").build_app
    return build_app if name == "build_app" else build_app(AppConfig())
