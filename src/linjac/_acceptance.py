"""Which arguments and outputs have a Jacobian: integers, PRNG keys and complex numbers, as in JAX, in every mode.

This module looks at the types of a program only.
"""

from linjac._errors import compose
from linjac._program import Program
from linjac._tree import is_complex, is_key, short


def check_inputs(who: str, program: Program, *, holomorphic: bool, allow_int: bool) -> None:
    """Arguments without a derivative are refused whole; such leaves in a tree are held."""
    layout = program.layout
    complex_: list[str] = []
    real: list[str] = []
    bad: list[str] = []
    moving: dict[str, bool] = {}
    for leaf in program.inputs.leaves:
        slot, _, rest = leaf.name.removeprefix("tangents[").partition("]")
        name = f"args[{layout.argnums[int(slot)] - layout.shift}]{rest}"
        moving[slot] = moving.get(slot, False) or leaf.slot is not None
        if leaf.slot is not None:
            (complex_ if is_complex(leaf.aval) else real).append(f"{name}: {short(leaf.aval)}")
    for leaf in program.inputs.leaves:
        slot, _, rest = leaf.name.removeprefix("tangents[").partition("]")
        if leaf.aval is not None and not moving[slot] and not (allow_int and not is_key(leaf.aval)):
            kind = "a PRNG key" if is_key(leaf.aval) else "an integer or bool"
            bad.append(f"args[{layout.argnums[int(slot)] - layout.shift}]{rest}: {short(leaf.aval)}, {kind}")
    if bad:
        remedy = "cast to float, leave it out of argnums, or pass allow_int=True for float0 blocks"
        raise TypeError(compose(who, "these arguments have no derivative", bad, remedy))
    if holomorphic and real:
        raise TypeError(compose(who, "holomorphic=True needs complex inputs", real, "leave holomorphic out"))


def check_outputs(who: str, program: Program, *, holomorphic: bool) -> None:
    bad = [
        f"{leaf.name.replace('cotangent', 'output', 1)}: {short(leaf.aval)}"
        for leaf in program.outputs.leaves
        if leaf.aval is not None and leaf.slot is None
    ]
    if bad:
        raise TypeError(compose(who, "an integer output has no derivative", bad, "return it as aux (has_aux=True)"))
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
