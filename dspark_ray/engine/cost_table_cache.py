"""Where a cost table comes from: the configured file, an earlier start on the same hardware, or a fresh profile.

Tables are kept in the user's cache under a key of model, dtype, device, group, drafter and versions.
"""

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from dspark_ray.algorithm.cost_table import CostTable, cache_file_name
from dspark_ray.config import AppConfig
from dspark_ray.engine.batch import TargetInfo
from dspark_ray.errors import ConfigError
from dspark_ray.models.resolve import cache_folder

logger = logging.getLogger(__name__)

NAMED = ("model", "dtype", "device", "tensor_parallel_size")  # parts of the key that show in the file's name


def cached_path(config: AppConfig, info: TargetInfo, executor: str) -> Path:
    """The file of this engine's table; another model, drafter, device, version or executor has another."""
    drafter = config.drafter
    versions = {key: value for key, value in info.provenance.items() if key not in NAMED}
    versions |= {
        "drafter": f"{drafter.kind} {drafter.model} {info.num_draft_tokens}",
        "max_num_seqs": str(config.engine.max_num_seqs),
        "executor": executor,
    }
    model, dtype, device, tp = (info.provenance[key] for key in NAMED)
    return cache_folder() / "cost_tables" / cache_file_name(model, dtype, device, int(tp), versions)


async def obtain_cost_table(config: AppConfig, path: Path, profile: Callable[[], Awaitable[CostTable]]) -> CostTable:
    """The configured table, else the cached one, else a profile, which is cached. ConfigError names a bad file."""
    if config.verification.cost_table is not None:
        return CostTable.load(config.verification.cost_table)
    if config.verification.cache_cost_table and path.is_file():
        try:
            return CostTable.load(path)
        except ConfigError as error:
            logger.warning("profiling again: the cached cost table is damaged (%s)", error)
    table = await profile()
    if config.verification.cache_cost_table:
        save_cost_table(table, path)
    return table


def save_cost_table(table: CostTable, path: Path) -> None:
    """Replace the file whole; a cache that cannot be written is said once and does not matter."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        table.save(partial)
        partial.replace(path)
    except OSError as error:
        logger.warning("the cost table is not cached: %s", error)
