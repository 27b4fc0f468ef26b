"""Fixtures of all tests: one thread (the machine is shared), and the reference material beside the checkout."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of reference vectors and prompts beside the checkout; absent in a public clone."""
    folder = REPOSITORY.parent / "shared"
    if not (folder / "golden").is_dir():
        pytest.skip("no ../shared beside the checkout: the reference vectors are not part of a public clone")
    return folder


@pytest.fixture(scope="session")
def golden_dir(shared_dir: Path) -> Path:
    """Vectors of the reference training code on tiny models."""
    return shared_dir / "golden"


@pytest.fixture(scope="session")
def fixtures_dir() -> Path:
    """Tiny seeded models and vectors made by tests/fixtures/make_fixtures.py; part of the repository."""
    return REPOSITORY / "tests" / "fixtures"


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """One small Ray for all tests that need one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        ray.init(
            address="local",
            num_cpus=8,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            log_to_driver=False,
        )
        yield
        ray.shutdown()
