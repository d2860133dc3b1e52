"""Where a figure or a verdict was seen: versions, device and the settings of JAX that change numbers.

A report and a baseline carry it, so that two of them can be compared. This module must not know what was seen.
"""

import importlib.metadata
import os
import platform
from dataclasses import asdict, dataclass, fields
from typing import Any

import jax

_FLAGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_debug_nans",
    "jax_disable_jit",
)


@dataclass(frozen=True)
class Environment:
    """Versions, device and settings, as plain values.

    Attributes:
        linjac: Version of linjac.
        jax: Version of JAX.
        jaxlib: Version of jaxlib.
        python: Version of Python.
        machine: Operating system and processor, and the number of processors.
        backend: JAX's default backend, `"cpu"` or `"gpu"`, say.
        device: Kind of the default device.
        devices: Number of devices.
        processes: Number of processes.
        flags: Name and value of the settings of JAX that change numbers, and of `XLA_FLAGS`.
    """

    linjac: str
    jax: str
    jaxlib: str
    python: str
    machine: str
    backend: str
    device: str
    devices: int
    processes: int
    flags: tuple[tuple[str, str], ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {**asdict(self), "flags": dict(self.flags)}

    def differences(self, other: "Environment") -> tuple[str, ...]:
        """One line for each entry in which `other` differs from this one."""
        lines = [
            f"{field.name}: {getattr(self, field.name)} -> {getattr(other, field.name)}"
            for field in fields(self)
            if field.name != "flags" and getattr(self, field.name) != getattr(other, field.name)
        ]
        mine, theirs = dict(self.flags), dict(other.flags)
        names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
        return (*lines, *(f"{name}: {mine.get(name, 'unset')} -> {theirs.get(name, 'unset')}" for name in names))

    def __str__(self) -> str:
        """Two lines."""
        versions = f"linjac {self.linjac}, JAX {self.jax}, jaxlib {self.jaxlib}, Python {self.python}"
        devices = f"{self.devices} device{'' if self.devices == 1 else 's'}"
        flags = ", ".join(f"{name.removeprefix('jax_')}={value}" for name, value in self.flags)
        return f"{versions}; {self.backend} ({self.device}, {devices}), {self.machine}\n{flags}"


def environment() -> Environment:
    """What is here and now."""
    flags = [(name, str(getattr(jax.config, name))) for name in _FLAGS if hasattr(jax.config, name)]
    if os.environ.get("XLA_FLAGS"):
        flags.append(("XLA_FLAGS", os.environ["XLA_FLAGS"]))
    return Environment(
        linjac=_version("linjac"),
        jax=_version("jax"),
        jaxlib=_version("jaxlib"),
        python=platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors",
        backend=jax.default_backend(),
        device=jax.devices()[0].device_kind,
        devices=jax.device_count(),
        processes=jax.process_count(),
        flags=tuple(flags),
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"
