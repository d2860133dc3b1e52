"""Strict settings for every test: eight virtual devices, x64 (unless LINJAC_TEST_X64=0), no silent promotion.

Annotations of private modules are checked at run time, by jaxtyping's import hook, unless LINJAC_TEST_TYPES=0. The
flags must be set before the first import of jax, and the hook before that of linjac, hence at module level.
"""

import os

_DEVICES = "--xla_force_host_platform_device_count=8"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()

import jax
import pytest

jax.config.update("jax_enable_x64", os.environ.get("LINJAC_TEST_X64", "1") != "0")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Not the modules of the public functions, which refuse wrong arguments in words of their own.
_CHECKED = (
    *(
        "_acceptance",
        "_arguments",
        "_blocks",
        "_choice",
        "_constants",
        "_cut",
        "_decide",
        "_directions",
        "_eager",
        "_errors",
    ),
    *("_guard", "_kernel", "_measure", "_memory", "_options", "_plan", "_program", "_residuals", "_space", "_sweeps"),
    *("_tracing", "_tree", "_counts", "_watch", "_timing", "_mode_report"),
    *("_blockwise", "_criteria", "_finite", "_keys", "_precision", "_probe", "_report", "_routes", "_subject"),
    *("_tolerances",),
    *("_archive", "_compare", "_described", "_differences", "_fingerprint", "_observe", "_origin", "_tape"),
)

if os.environ.get("LINJAC_TEST_TYPES", "1") != "0":
    from jaxtyping import install_import_hook

    install_import_hook([f"linjac.{name}" for name in _CHECKED], "beartype.beartype")


@pytest.fixture(autouse=True)
def _forget_traces():
    """Each test counts retraces from zero, whatever ran before it in the same process."""
    from linjac import _tracing

    _tracing._traces.clear()
