"""How much memory there is: on an accelerator the device's, on CPU the host's."""

import functools
import os
from pathlib import Path
from typing import Any

import jax
import jax.core


@functools.cache
def _host() -> int:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 1 << 40
    try:  # a container may have less
        return min(pages, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return pages


@functools.cache
def _of(device: Any) -> int:
    stats = device.memory_stats() if device.platform != "cpu" else None
    return int(stats["bytes_limit"]) if stats and "bytes_limit" in stats else _host()


def memory_of(leaves: list[Any]) -> int:
    """Bytes of memory where these arrays live (the default device for tracers and for no arrays)."""
    for leaf in leaves:
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
            return min(map(_of, leaf.devices()))
    return _of(jax.devices()[0])
