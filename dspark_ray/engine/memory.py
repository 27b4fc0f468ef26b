"""How many pages fit into the memory that is really free."""

import torch

from dspark_ray.errors import ConfigError


def free_memory_bytes(device: torch.device) -> int:
    """Free memory of a CUDA device, or what the kernel calls available for a CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024


def num_pages_that_fit(page_bytes: int, fraction: float, device: torch.device, most: int) -> int:
    """Pages within `fraction` of the free memory, at most `most`; ConfigError if not even two fit."""
    free = free_memory_bytes(device)
    pages = min(int(free * fraction) // page_bytes, most)
    if pages < 2:
        raise ConfigError(
            f"no room for K/V pages: {free / 2**30:.2f} GiB free on {device}, kv_memory_fraction {fraction} gives "
            f"{pages} pages of {page_bytes / 2**20:.2f} MiB; expected at least 2: free memory or raise the fraction"
        )
    return pages
