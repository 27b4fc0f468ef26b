"""`dspark-ray serve`: the Serve application in the foreground until Ctrl-C, then everything it started goes down."""

import json
import os
import signal
import socket
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import ray
from ray import serve

from deployments.builder import build_app
from dspark_ray.cli.arguments import config_from
from dspark_ray.config import AppConfig
from dspark_ray.errors import ConfigError
from dspark_ray.models.resolve import resolve_drafter, resolve_model

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_SECONDS = 0.5


class StopServing(BaseException):
    """A stop signal arrived while something was under way. Not an Exception: nothing in between may swallow it."""


def run(args: Namespace) -> int:
    config = config_from(args)
    if args.address is None:
        resolve_model(config.target.model)  # with its progress bar and errors here, not in a replica's log
        resolve_drafter(config.drafter, config.target.model)
        check_port_is_free(args.host, args.port)
    parent = os.getppid() if args.stop_with_parent else None
    try:
        with _ray(args.address):
            return _serve(config, args, parent)
    except StopServing:
        print("stopped", file=sys.stderr)
        return 0


def check_port_is_free(host: str, port: int) -> None:
    """Serve would report a taken port only in a proxy's log, and wait."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port} ({error.strerror}); give another --host or --port"
            ) from error


def _serve(config: AppConfig, args: Namespace, parent: int | None) -> int:
    try:
        serve.start(http_options={"host": args.host, "port": args.port})
        serve.run(build_app(config), name=args.name, route_prefix="/")
    except RuntimeError as error:  # what serve.run raises when a deployment cannot start
        print(f"dspark-ray: error: {error}", file=sys.stderr)
        return 1
    print(ready_message(config, args.host, args.port), flush=True)
    forever = threading.Event()
    while not forever.wait(POLL_SECONDS):
        if parent is not None and os.getppid() != parent:
            raise StopServing
    return 0


def ready_message(config: AppConfig, host: str, port: int) -> str:
    """What a newcomer types next."""
    base = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
    question = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"model": config.target.name, "messages": [question], "temperature": 0})
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    return (
        f"\nServing {config.target.name} at {base}/v1 (Ctrl-C stops everything). Try:\n\n"
        f"  curl {base}/v1/chat/completions -H 'Content-Type: application/json' \\\n    -d '{body}'\n"
        f"  curl {base}/stats\n"
        f"  RAY_AUTH_MODE={mode} ray list actors\n"
    )


@contextmanager
def _ray(address: str | None) -> Iterator[None]:
    """A Ray of our own, or a connection to one that is there. On leaving, what was started here is taken down."""
    _stop_on_signals()
    ray.init(address=address or "local", namespace="serve", log_to_driver=False)
    _stop_on_signals()  # again: ray.init installs handlers of its own, one of which aborts
    try:
        yield
    finally:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # an impatient second Ctrl-C must not leave half of it running
        if address is None:
            serve.shutdown()
        ray.shutdown()


def _stop_on_signals() -> None:
    """SIGINT, SIGTERM and SIGHUP unwind the stack, so that every `finally` runs. SIGINT is caught even where a shell
    started us in the background and set it to be ignored."""
    for number in STOP_SIGNALS:
        signal.signal(number, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    raise StopServing
