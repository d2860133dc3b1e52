"""Which arguments and outputs have a Jacobian: integers, PRNG keys and complex numbers, as in JAX, in every mode.

This module looks at the types of a program only.
"""

from linjac._errors import compose
from linjac._program import Program
from linjac._space import Leaf
from linjac._tree import is_complex, is_key, short


def check_inputs(who: str, program: Program, *, holomorphic: bool, allow_int: bool, hold: bool) -> None:
    """Arguments without any derivative are refused, unless `hold`; such leaves in a tree are held."""
    by_argument: dict[str, list[tuple[str, Leaf]]] = {}
    for leaf in program.inputs.leaves:
        slot = leaf.name.partition("]")[0]
        by_argument.setdefault(slot, []).append((program.argument_name(leaf.name, "args"), leaf))
    bad: list[str] = []
    only_keys = True
    for leaves in by_argument.values():
        if hold or any(leaf.slot is not None for _, leaf in leaves):
            continue
        for name, leaf in leaves:
            integer = leaf.aval is not None and not is_key(leaf.aval)
            if leaf.present and not (allow_int and integer):
                bad.append(f"{name}: {_kind(leaf)}")
                only_keys = only_keys and not integer
    if bad:
        remedy = "leave it out of argnums"
        if not only_keys:
            remedy = f"cast to float, {remedy}, or pass allow_int=True for float0 blocks"
        raise TypeError(compose(who, "these arguments have no derivative", bad, remedy))
    real = [
        f"{name}: {short(leaf.aval)}"
        for leaves in by_argument.values()
        for name, leaf in leaves
        if leaf.slot is not None and not is_complex(leaf.aval)
    ]
    if holomorphic and real:
        raise TypeError(compose(who, "holomorphic=True needs complex inputs", real, "leave holomorphic out"))


def _kind(leaf: Leaf) -> str:
    if leaf.aval is None:
        return "no array"
    return f"{short(leaf.aval)}, {'a PRNG key' if is_key(leaf.aval) else 'an integer or bool'}"


def check_outputs(who: str, program: Program, *, holomorphic: bool) -> None:
    """Outputs without derivative are refused, and complex ones where they have no complex Jacobian."""
    bad = [
        f"{leaf.name.replace('cotangent', 'output', 1)}: {_kind(leaf)}"
        for leaf in program.outputs.leaves
        if leaf.aval is not None and leaf.slot is None
    ]
    if bad:
        raise TypeError(compose(who, "these outputs have no derivative", bad, "return it as aux (has_aux=True)"))
    outs = program.outputs
    names = zip(outs.names, outs.avals, strict=True)
    pairs = [(name.replace("cotangent", "output", 1), aval) for name, aval in names]
    if holomorphic:
        real = [f"{name}: {short(aval)}" for name, aval in pairs if not is_complex(aval)]
        if real:
            raise TypeError(compose(who, "holomorphic=True needs complex outputs", real, "leave holomorphic out"))
    elif program.inputs.is_complex and outs.is_complex:
        lines = [f"{name}: {short(aval)}" for name, aval in pairs if is_complex(aval)]
        what = "a function from complex to complex has a complex Jacobian only where it is holomorphic"
        remedy = "pass holomorphic=True if it is; otherwise differentiate real and imaginary parts"
        raise TypeError(compose(who, what, lines, remedy))
