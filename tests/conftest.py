"""Strict settings for every test: eight virtual devices, x64 (unless LINJAC_TEST_X64=0), no silent promotion.

The flags must be in the environment before the first import of jax, hence at module level.
"""

import os

_DEVICES = "--xla_force_host_platform_device_count=8"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()

import jax

jax.config.update("jax_enable_x64", os.environ.get("LINJAC_TEST_X64", "1") != "0")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
