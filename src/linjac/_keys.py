"""Whether a function uses a PRNG key twice, found by tracing it. This module must not know derivatives."""

from typing import Any

import jax

from linjac._constants import subjaxprs
from linjac._probe import SkipError, Verdict
from linjac._program import first_line
from linjac._subject import Subject
from linjac._tree import is_key


def keys(subject: Subject) -> Verdict:
    """No PRNG key is used twice: nothing runs, and no key of the caller's counts as used afterwards."""
    if not hasattr(subject.jaxpr, "eqns"):
        raise SkipError(f"fun cannot be traced: {first_line(subject.jaxpr)}")
    try:
        with jax.debug_key_reuse(True):
            jaxpr = jax.make_jaxpr(lambda *moving: subject.call(*moving))(*subject.point)
    except jax.errors.KeyReuseError as err:
        return Verdict(detail=first_line(err), failed=True)
    if not _uses_keys(jaxpr):
        raise SkipError("fun uses no typed PRNG key (jax.random.key)")
    return Verdict()


def _uses_keys(jaxpr: Any) -> bool:
    variables = [*jaxpr.invars, *jaxpr.constvars, *(var for eqn in jaxpr.eqns for var in (*eqn.invars, *eqn.outvars))]
    if any(hasattr(var.aval, "dtype") and is_key(var.aval) for var in variables):
        return True
    return any(_uses_keys(sub) for eqn in jaxpr.eqns for sub in subjaxprs(eqn))
