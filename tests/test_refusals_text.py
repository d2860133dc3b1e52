"""The exact text of every refusal of linearize_many and its relatives: what is wrong, the leaves by path, one remedy.

`test_refusals_semantics.py` tests the classes and what no text may show, over more cases.
"""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import linjac
from scenarios import FULL, C, F, array, real
from scenarios import SHORT as S

OTHER, NARROW = (jnp.float32, "f32") if FULL else (jnp.bfloat16, "bf16")
INT = "i64" if FULL else "i32"
COMPLEX = "c128" if FULL else "c64"
SECRET = 123456.0
PATH = "tangents[0]['layers'][0]"
POINT = {
    "layers": [{"w": array(real(2, 3, seed=81)), "b": array(real(2, seed=82))}],
    "scale": array(0.5),
    "index": jnp.asarray([0, 1], jnp.int32),
}
X2 = array(real(2, seed=83, low=0.5))


def full(*shape, dtype=F):
    return jnp.full(shape, SECRET, F).astype(dtype)


def net(tree):
    layer = tree["layers"][0]
    return {"out": jnp.sum(layer["w"], 1) * layer["b"][tree["index"]], "scale": tree["scale"] ** 2}


def multiply(x, y):
    return x * y


def held(tree):
    return tree["act"](tree["x"])


def with_index(x):
    return x, jnp.argmax(x).astype(jnp.int32)


def looped(x):
    return jax.lax.while_loop(lambda c: jnp.sum(c) < 50.0, lambda c: c * 2, x)


def called_back(x):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def half_complex(x, z):
    return jnp.asarray([1j], C) * jnp.sum(x).astype(C) + z


def tangent(**changes):
    layer = {"w": full(2, 3), "b": full(2)} | {k: v for k, v in changes.items() if k in ("w", "b")}
    tree = {"layers": [layer], "scale": full(), "index": None}
    return tree | {k: v for k, v in changes.items() if k not in ("w", "b")}


def batch(size, **changes):
    return jax.tree.map(lambda x: jnp.stack([x] * size), tangent(**changes))


def without(name):
    tree = tangent()
    (tree if name in tree else tree["layers"][0]).pop(name)
    return tree


class Made:
    """Linearizations that the cases share, each made when it is first asked for."""

    @functools.cached_property
    def tree(self):
        return linjac.linearize_many(net, POINT)[1]

    @functools.cached_property
    def two(self):
        return linjac.linearize_many(multiply, X2, X2)[1]

    @functools.cached_property
    def one(self):
        return linjac.linearize_many(jnp.sin, X2)[1]

    @functools.cached_property
    def held(self):
        return linjac.linearize_many(held, {"x": X2, "name": "123456", "act": jnp.sin})[1]

    @functools.cached_property
    def index(self):
        return linjac.linearize_many(with_index, X2)[1]

    @functools.cached_property
    def mapped(self):
        return jax.vmap(lambda x: linjac.linearize_many(jnp.cos, x)[1])(array(real(4, 3, seed=84)))

    @functools.cached_property
    def nine(self):
        return linjac.linearize_many(lambda xs: sum(xs[1:], xs[0]), [X2] * 9)[1]


made = Made()


def refusal(call, error=linjac.TangentError):
    """The text of what a call raises, after the checks that hold for every refusal."""
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    text = str(caught.value)
    assert text.startswith("linjac.")
    assert "123456" not in text
    return text


def check(table):
    """A parametrized test of a table: name -> (call, rows of the text) or (call, rows, error)."""
    return pytest.mark.parametrize("name", list(table))


# Trees ----------------------------------------------------------------------------------------------------------------

STRUCTURE = "linjac.linear_fn: tangents have another structure than the point"
EXPECTED = "one for each differentiated argument, got"
LIST = "PyTreeDef(({'index': *, 'layers': [{'b': *, 'w': *}], 'scale': *},))"
TUPLE = "PyTreeDef(({'index': *, 'layers': ({'b': *, 'w': *},), 'scale': *},))"
TREES = {
    "missing leaf": (lambda: made.tree(without("b")), [STRUCTURE, f"  {PATH}['b']: missing, expected {S}[2]"]),
    "extra leaf": (
        lambda: made.tree(tangent(bias=full(2))),
        [STRUCTURE, f"  tangents[0]['bias']: not in the point, got {S}[2]"],
    ),
    "renamed leaf": (
        lambda: made.tree(without("scale") | {"scales": full()}),
        [
            STRUCTURE,
            f"  tangents[0]['scale']: missing, expected {S}[]",
            f"  tangents[0]['scales']: not in the point, got {S}[]",
        ],
    ),
    "tuple for list": (
        lambda: made.tree(tangent() | {"layers": tuple(tangent()["layers"])}),
        [STRUCTURE, f"  tangents: expected {LIST}, got {TUPLE}"],
    ),
    "list for an array": (
        lambda: made.one([SECRET, SECRET]),
        [
            STRUCTURE,
            f"  tangents[0]: missing, expected {S}[2]",
            f"  tangents[0][0]: not in the point, got {S}[]",
            f"  tangents[0][1]: not in the point, got {S}[]",
        ],
    ),
    "tuple-wrapped": (
        lambda: made.two((full(2), full(2))),
        [
            f"linjac.linear_fn: expected 2 tangents, {EXPECTED} 1",
            f"  tangents[0]: missing, expected {S}[2]",
            f"  tangents[1]: missing, expected {S}[2]",
            f"  tangents[0][0]: not in the point, got {S}[2]",
            f"  tangents[0][1]: not in the point, got {S}[2]",
            "did you mean linear_fn(*tangents)?",
        ],
    ),
    "tuple-wrapped, one argument": (
        lambda: made.one((full(2),)),
        [
            STRUCTURE,
            f"  tangents[0]: missing, expected {S}[2]",
            f"  tangents[0][0]: not in the point, got {S}[2]",
            "did you mean linear_fn(*tangents)?",
        ],
    ),
    "tuple-wrapped batch": (
        lambda: made.two.many((full(3, 2), full(3, 2))),
        [
            f"linjac.linear_fn.many: expected 2 tangents, {EXPECTED} 1",
            f"  tangents[0]: missing, expected {S}[2]",
            f"  tangents[1]: missing, expected {S}[2]",
            f"  tangents[0][0]: not in the point, got {S}[3,2]",
            f"  tangents[0][1]: not in the point, got {S}[3,2]",
            "did you mean linear_fn.many(*tangents)?",
        ],
    ),
    "too few": (
        lambda: made.two(full(2)),
        [f"linjac.linear_fn: expected 2 tangents, {EXPECTED} 1", f"  tangents[1]: missing, expected {S}[2]"],
    ),
    "too many": (
        lambda: made.two(full(2), full(2), full(2)),
        [f"linjac.linear_fn: expected 2 tangents, {EXPECTED} 3", f"  tangents[2]: not in the point, got {S}[2]"],
    ),
}


@check(TREES)
def test_trees(name):
    call, rows = TREES[name]
    assert refusal(call).splitlines() == rows


def test_a_flat_vector_for_a_tree():
    """The rows are pinned; a remedy (`linear_fn.matvec` takes flat vectors) may follow."""
    rows = [
        STRUCTURE,
        "  tangents[0]['index']: missing, expected None",
        f"  {PATH}['b']: missing, expected {S}[2]",
        f"  {PATH}['w']: missing, expected {S}[2,3]",
        f"  tangents[0]['scale']: missing, expected {S}[]",
        f"  tangents[0]: not in the point, got {S}[9]",
    ]
    assert refusal(lambda: made.tree(full(9))).splitlines()[:6] == rows


# Leaves ---------------------------------------------------------------------------------------------------------------

UNFIT = "linjac.linear_fn: tangents do not fit the point"
FLOAT = "(a Python float is taken here, an int is not)"
HELD = "this leaf cannot move (i32[2]), expected None or np.zeros((2,), jax.dtypes.float0), got"
LEAVES = {
    "shape": ({"b": full(3)}, f"{PATH}['b']: expected {S}[2], got {S}[3]"),
    "transposed": ({"w": full(3, 2)}, f"{PATH}['w']: expected {S}[2,3], got {S}[3,2]"),
    "would broadcast": ({"b": full(1)}, f"{PATH}['b']: expected {S}[2], got {S}[1]"),
    "a scalar would broadcast": ({"b": full()}, f"{PATH}['b']: expected {S}[2], got {S}[]"),
    "a Python float would broadcast": ({"b": SECRET}, f"{PATH}['b']: expected {S}[2], got {S}[]"),
    "one element for a scalar": ({"scale": full(1, 1)}, f"tangents[0]['scale']: expected {S}[], got {S}[1,1]"),
    "other float": ({"b": full(2, dtype=OTHER)}, f"{PATH}['b']: expected {S}[2], got {NARROW}[2]"),
    "numpy float16": ({"b": np.full(2, 1.0, np.float16)}, f"{PATH}['b']: expected {S}[2], got f16[2]"),
    "bfloat16": ({"b": full(2, dtype=jnp.bfloat16)}, f"{PATH}['b']: expected {S}[2], got bf16[2]"),
    "int32": ({"b": full(2, dtype=jnp.int32)}, f"{PATH}['b']: expected {S}[2], got i32[2]"),
    "bool": ({"b": full(2, dtype=bool)}, f"{PATH}['b']: expected {S}[2], got bool[2]"),
    "complex": ({"b": full(2, dtype=C)}, f"{PATH}['b']: expected {S}[2], got {COMPLEX}[2] (complex for a real leaf)"),
    "Python int": ({"scale": 123456}, f"tangents[0]['scale']: expected {S}[], got {INT}[] {FLOAT}"),
    "Python bool": ({"scale": True}, f"tangents[0]['scale']: expected {S}[], got bool[] {FLOAT}"),
    "Python complex": (
        {"scale": 123456j},
        f"tangents[0]['scale']: expected {S}[], got {COMPLEX}[] (complex for a real leaf)",
    ),
    "string": ({"b": "123456"}, f"{PATH}['b']: expected {S}[2], got str"),
    "None": ({"b": None}, f"{PATH}['b']: expected {S}[2], got None"),
    "a type": (
        {"b": jax.ShapeDtypeStruct((2,), F)},
        f"{PATH}['b']: expected {S}[2], got {S}[2] (a type, not an array)",
    ),
    "ints at an integer leaf": ({"index": full(2, dtype=jnp.int32)}, f"tangents[0]['index']: {HELD} i32[2]"),
    "zeros at an integer leaf": ({"index": jnp.zeros(2, F)}, f"tangents[0]['index']: {HELD} {S}[2]"),
    "float0 of another shape": (
        {"index": np.zeros(3, jax.dtypes.float0)},
        f"tangents[0]['index']: {HELD} float0[3]",
    ),
}


@check(LEAVES)
def test_leaves(name):
    changes, row = LEAVES[name]
    assert refusal(lambda: made.tree(tangent(**changes))).splitlines() == [UNFIT, f"  {row}"]


MORE_LEAVES = {
    "several": (
        lambda: made.tree(tangent(b=full(3), w=full(6), scale=full(4, 1))),
        [
            UNFIT,
            f"  {PATH}['b']: expected {S}[2], got {S}[3]",
            f"  {PATH}['w']: expected {S}[2,3], got {S}[6]",
            f"  tangents[0]['scale']: expected {S}[], got {S}[4,1]",
        ],
    ),
    "five are shown": (
        lambda: made.nine([full(3)] * 9),
        [UNFIT, *(f"  tangents[0][{i}]: expected {S}[2], got {S}[3]" for i in range(5)), "  and 4 more"],
    ),
    "what is no array": (
        lambda: made.held({"x": full(2), "name": "123456", "act": jnp.sin}),
        [
            UNFIT,
            "  tangents[0]['act']: this leaf cannot move (no array), expected None, got PjitFunction",
            "  tangents[0]['name']: this leaf cannot move (no array), expected None, got str",
        ],
    ),
    "second argument": (
        lambda: made.two(full(2), full(2, dtype=OTHER)),
        [UNFIT, f"  tangents[1]: expected {S}[2], got {NARROW}[2]"],
    ),
}


@check(MORE_LEAVES)
def test_more_leaves(name):
    call, rows = MORE_LEAVES[name]
    assert refusal(call).splitlines() == rows


# Batches --------------------------------------------------------------------------------------------------------------

MANY = "linjac.linear_fn.many"
MISSING = "(the axis of directions is missing)"
BATCHES = {
    "for one tangent": (
        lambda: made.tree(batch(3)),
        [
            UNFIT,
            f"  {PATH}['b']: expected {S}[2], got {S}[3,2]",
            f"  {PATH}['w']: expected {S}[2,3], got {S}[3,2,3]",
            f"  tangents[0]['scale']: expected {S}[], got {S}[3]",
            "for a batch of directions use linear_fn.many",
        ],
    ),
    "for two tangents": (
        lambda: made.two(full(5, 2), full(5, 2)),
        [
            UNFIT,
            f"  tangents[0]: expected {S}[2], got {S}[5,2]",
            f"  tangents[1]: expected {S}[2], got {S}[5,2]",
            "for a batch of directions use linear_fn.many",
        ],
    ),
    "axes that disagree": (
        lambda: made.tree.many(batch(3) | {"scale": full(4)}),
        [f"{MANY}: the leading axes disagree", f"  {PATH}['b']: 3 directions", "  tangents[0]['scale']: 4 directions"],
    ),
    "axes of the functional form that disagree": (
        lambda: linjac.jvp_many(multiply, (X2, X2), (full(4, 2), full(3, 2))),
        ["linjac.jvp_many: the leading axes disagree", "  tangents[0]: 4 directions", "  tangents[1]: 3 directions"],
    ),
    "ints at an integer leaf": (
        lambda: made.tree.many(batch(3) | {"index": full(3, 2, dtype=jnp.int32)}),
        [f"{MANY}: tangents do not fit the point", f"  tangents[0]['index']: {HELD} i32[3,2]"],
    ),
}


@check(BATCHES)
def test_batches(name):
    call, rows = BATCHES[name]
    assert refusal(call).splitlines() == rows


UNFIT_BATCHES = {
    "no axis": (
        lambda: made.two.many(full(2), full(2)),
        [
            f"  tangents[0]: expected {S}[K,2], got {S}[2] {MISSING}",
            f"  tangents[1]: expected {S}[K,2], got {S}[2] {MISSING}",
            "for a single one use linear_fn",
        ],
    ),
    "no axis at one leaf": (
        lambda: made.two.many(full(3, 2), full(2)),
        [f"  tangents[1]: expected {S}[K,2], got {S}[2] {MISSING}", "for a single one use linear_fn"],
    ),
    "no axis at a scalar": (
        lambda: made.tree.many(batch(3) | {"scale": full()}),
        [f"  tangents[0]['scale']: expected {S}[K], got {S}[] {MISSING}", "for a single one use linear_fn"],
    ),
    "shape": (
        lambda: made.tree.many(batch(3, b=full(3))),
        [f"  {PATH}['b']: expected {S}[K,2], got {S}[3,3]"],
    ),
    "dtype": (
        lambda: made.tree.many(batch(3, b=full(2, dtype=OTHER))),
        [f"  {PATH}['b']: expected {S}[K,2], got {NARROW}[3,2]"],
    ),
    "complex": (
        lambda: made.one.many(full(3, 2, dtype=C)),
        [f"  tangents[0]: expected {S}[K,2], got {COMPLEX}[3,2] (complex for a real leaf)"],
    ),
    "cotangents": (
        lambda: made.two.transpose_many(full(2)),
        [f"  cotangent: expected {S}[K,2], got {S}[2] {MISSING}", "for a single one use linear_fn.transpose"],
    ),
}


@check(UNFIT_BATCHES)
def test_batches_that_do_not_fit(name):
    """All but the grammar of the first line ("a batch of tangents do not", "a batch of cotangent do not")."""
    call, rows = UNFIT_BATCHES[name]
    first, *rest = refusal(call).splitlines()
    assert first.startswith("linjac.linear_fn.")
    assert "a batch of" in first
    assert rest == rows


# Cotangents -----------------------------------------------------------------------------------------------------------

TRANSPOSE = "linjac.linear_fn.transpose: cotangent"
COTANGENTS = {
    "list": (
        lambda: made.tree.transpose([SECRET, SECRET]),
        [
            f"{TRANSPOSE} has another structure than the output",
            f"  cotangent['out']: missing, expected {S}[2]",
            f"  cotangent['scale']: missing, expected {S}[]",
            f"  cotangent[0]: not in the output, got {S}[]",
            f"  cotangent[1]: not in the output, got {S}[]",
        ],
    ),
    "numpy object": (
        lambda: made.two.transpose(np.array([SECRET, "123456"], object)),
        [f"{TRANSPOSE} does not fit the output", f"  cotangent: expected {S}[2], got object[2]"],
    ),
    "string": (
        lambda: made.two.transpose("123456"),
        [f"{TRANSPOSE} does not fit the output", f"  cotangent: expected {S}[2], got str"],
    ),
    "None": (
        lambda: made.tree.transpose(None),
        [
            f"{TRANSPOSE} has another structure than the output",
            f"  cotangent['out']: missing, expected {S}[2]",
            f"  cotangent['scale']: missing, expected {S}[]",
            "  cotangent: not in the output, got None",
        ],
    ),
    "missing leaf": (
        lambda: made.tree.transpose({"out": full(2)}),
        [f"{TRANSPOSE} has another structure than the output", f"  cotangent['scale']: missing, expected {S}[]"],
    ),
    "tuple": (
        lambda: made.two.transpose((full(2),)),
        [
            f"{TRANSPOSE} has another structure than the output",
            f"  cotangent: missing, expected {S}[2]",
            f"  cotangent[0]: not in the output, got {S}[2]",
        ],
    ),
    "shape": (
        lambda: made.tree.transpose({"out": full(3), "scale": full()}),
        [f"{TRANSPOSE} does not fit the output", f"  cotangent['out']: expected {S}[2], got {S}[3]"],
    ),
    "dtype": (
        lambda: made.two.transpose(full(2, dtype=OTHER)),
        [f"{TRANSPOSE} does not fit the output", f"  cotangent: expected {S}[2], got {NARROW}[2]"],
    ),
    "integer": (
        lambda: made.two.transpose(full(2, dtype=jnp.int32)),
        [f"{TRANSPOSE} does not fit the output", f"  cotangent: expected {S}[2], got i32[2]"],
    ),
    "at an integer output": (
        lambda: made.index.transpose((full(2), full(dtype=jnp.int32))),
        [
            f"{TRANSPOSE} does not fit the output",
            "  cotangent[1]: this leaf cannot move (i32[]), expected None or np.zeros((), jax.dtypes.float0), "
            "got i32[]",
        ],
    ),
    "batch": (
        lambda: made.two.transpose(full(5, 2)),
        [
            f"{TRANSPOSE} does not fit the output",
            f"  cotangent: expected {S}[2], got {S}[5,2]",
            "for a batch of directions use linear_fn.transpose_many",
        ],
    ),
    "another tree in a batch": (
        lambda: linjac.vjp_many(jnp.sin, (X2,), {"a": full(3, 2)}),
        [
            "linjac.vjp_many: cotangent has another structure than the output",
            f"  cotangent: missing, expected {S}[2]",
            f"  cotangent['a']: not in the output, got {S}[3,2]",
        ],
    ),
}


@check(COTANGENTS)
def test_cotangents(name):
    call, rows = COTANGENTS[name]
    assert refusal(call).splitlines() == rows


# Points ---------------------------------------------------------------------------------------------------------------

CHECK = "linjac.linear_fn.check_point: this is not the point"
MOVED = f"{CHECK} of the linearization"
POINTS = {
    "value": (
        lambda: made.tree.check_point(POINT | {"scale": full()}),
        [MOVED, "  primals[0]['scale']: moved", "linearize again there"],
    ),
    "integer": (
        lambda: made.tree.check_point(POINT | {"index": full(2, dtype=jnp.int32)}),
        [MOVED, "  primals[0]['index']: moved", "linearize again there"],
    ),
    "shape": (
        lambda: made.tree.check_point(POINT | {"scale": full(2)}),
        [MOVED, f"  primals[0]['scale']: expected {S}[], got {S}[2]", "linearize again there"],
    ),
    "dtype": (
        lambda: made.two.check_point(X2, X2.astype(OTHER)),
        [MOVED, f"  primals[1]: expected {S}[2], got {NARROW}[2]", "linearize again there"],
    ),
    "renamed leaf": (
        lambda: made.held.check_point({"y": X2, "name": "123456", "act": jnp.sin}),
        [f"{CHECK}: the structure differs", "  primals[0]['x']: missing", "  primals[0]['y']: not in the point"],
    ),
    "number": (lambda: made.two.check_point(X2), [f"{CHECK}: the structure differs", "  primals[1]: missing"]),
    "tuple for list": (
        lambda: made.tree.check_point(POINT | {"layers": tuple(POINT["layers"])}),
        [f"{CHECK}: the structure differs", f"  expected {LIST}, got {TUPLE}"],
    ),
    "tracer": (
        lambda: jax.jit(made.one.check_point)(X2),
        [
            "linjac.linear_fn.check_point: the point cannot be compared inside a trace, where values are not known",
            "call it outside jax.jit, jax.vmap and jax.grad",
        ],
    ),
}


@check(POINTS)
def test_points(name):
    call, rows = POINTS[name]
    assert refusal(call, linjac.PointError).splitlines() == rows


def _squared(x):
    return x * jnp.sin(x)


@pytest.mark.parametrize("strategy", ["stored", "recompute"])
def test_a_deleted_point(strategy):
    x = X2 + 0
    linear_fn = linjac.linearize_many(_squared, x, strategy=strategy)[1]
    linear_fn(full(2))  # compiled before
    x.delete()
    rows = [
        "an array has been deleted (donated to another computation)",
        "pass arrays that are alive, or do not donate them",
    ]
    for who, call in (
        ("linear_fn", lambda: linear_fn(full(2))),
        ("linear_fn.transpose", lambda: linear_fn.transpose(full(2))),
        ("linear_fn.many", lambda: linear_fn.many(full(3, 2))),
    ):
        assert refusal(call, linjac.PointError).splitlines() == [f"linjac.{who}: {rows[0]}", rows[1]]


def test_a_point_that_is_deleted_already():
    x = X2 + 0
    linear_fn = linjac.linearize_many(_squared, x)[1]
    x.delete()
    deleted = "an array has been deleted (donated to another computation)"
    for who, call in (
        ("linearize_many", lambda: linjac.linearize_many(_squared, x)),
        ("linearize_many", lambda: linjac.linearize_many(_squared, x, jit=False)),
        ("linear_fn.check_point", lambda: linear_fn.check_point(X2)),
    ):
        with pytest.raises((linjac.PointError, RuntimeError)) as caught:
            call()
        rows = str(caught.value).splitlines()
        assert rows == [f"linjac.{who}: {deleted}", "pass arrays that are alive, or do not donate them"]


def test_made_under_vmap_and_used_without_it():
    rows = [
        "linjac.linear_fn: made under jax.vmap (or stacked), and used without it",
        f"  a leaf is {S}[4,3] where the function was linearized at {S}[3]",
        "apply it under jax.vmap too",
    ]
    assert refusal(lambda: made.mapped(full(3))).splitlines() == rows


def test_leaves_that_were_cast():
    rows = [
        "linjac.linear_fn: its leaves have been cast since it was made",
        f"  a leaf is {NARROW}[2] where the function was linearized at {S}[2]",
        "linearize at a point of that dtype",
    ]
    cast = jax.tree.map(lambda leaf: leaf.astype(OTHER), made.one)
    assert refusal(lambda: cast(full(2))).splitlines() == rows


# Options --------------------------------------------------------------------------------------------------------------

ARGNUMS = [
    (2, ValueError, "argnums=2 is out of range for 2 positional arguments"),
    (-3, ValueError, "argnums=-3 is out of range for 2 positional arguments"),
    ((0, 2), ValueError, "argnums=2 is out of range for 2 positional arguments"),
    ((0, -2), ValueError, "argnums names a position twice: (0, 0)"),
    ((), ValueError, "argnums names no position, so there is nothing to differentiate"),
    ("x", TypeError, "argnums must hold ints, got str"),
    ((0, None), TypeError, "argnums must hold ints, got NoneType"),
    (0.5, TypeError, "argnums must be an int or a sequence of ints, got float"),
    (True, TypeError, "argnums must be an int or a sequence of ints, got bool"),
]


@pytest.mark.parametrize(("argnums", "error", "text"), ARGNUMS)
def test_argnums(argnums, error, text):
    calls = {
        "linearize_many": lambda: linjac.linearize_many(multiply, X2, X2, argnums=argnums),
        "residual_bytes": lambda: linjac.residual_bytes(multiply, X2, X2, argnums=argnums),
        "jvp_many": lambda: linjac.jvp_many(multiply, (X2, X2), (full(3, 2),), argnums=argnums),
        "vjp_many": lambda: linjac.vjp_many(multiply, (X2, X2), full(3, 2), argnums=argnums),
    }
    for who, call in calls.items():
        assert refusal(call, error) == f"linjac.{who}: {text}"


@pytest.mark.parametrize(("fun", "kind"), [(None, "NoneType"), (3, "int"), ("123456", "str"), ((jnp.sin,), "tuple")])
def test_fun_that_is_not_callable(fun, kind):
    calls = {
        "linearize_many": lambda: linjac.linearize_many(fun, X2),
        "residual_bytes": lambda: linjac.residual_bytes(fun, X2),
        "jvp_many": lambda: linjac.jvp_many(fun, (X2,), (full(3, 2),)),
        "vjp_many": lambda: linjac.vjp_many(fun, (X2,), full(3, 2)),
    }
    for who, call in calls.items():
        assert refusal(call, TypeError) == f"linjac.{who}: fun must be callable, got {kind}"


def test_fun_that_is_an_array():
    text = refusal(lambda: linjac.linearize_many(X2, X2), TypeError)
    assert text == f"linjac.linearize_many: fun must be callable, got {S}[2]"


@pytest.mark.parametrize(("value", "kind"), [("123456", "str"), (b"123456", "bytes")])
def test_a_primal_that_is_a_string(value, kind):
    rows = [f"  primals[1]: {kind}", "leave it out of argnums"]
    calls = {
        "linearize_many": lambda: linjac.linearize_many(multiply, X2, value),
        "residual_bytes": lambda: linjac.residual_bytes(multiply, X2, value),
        "jvp_many": lambda: linjac.jvp_many(multiply, (X2, value), (full(3, 2), None)),
    }
    for who, call in calls.items():
        assert refusal(call, TypeError).splitlines() == [f"linjac.{who}: a string has no derivative", *rows]


COUNTS = [
    (0, ValueError, "0"),
    (-1, ValueError, "-1"),
    (2.5, TypeError, "2.5"),
    (True, TypeError, "True"),
    ("123456", TypeError, "str"),
    (np.float64(2.0), TypeError, "2.0"),
    (1j, TypeError, "complex"),
]


@pytest.mark.parametrize(("value", "error", "shown"), COUNTS)
def test_counts(value, error, shown):
    batch = full(3, 2)
    calls = {
        "linear_fn.many": lambda **limit: made.one.many(batch, **limit),
        "linear_fn.transpose_many": lambda **limit: made.one.transpose_many(batch, **limit),
        "linear_fn.jacobian": lambda **limit: made.one.jacobian(**limit),
        "jvp_many": lambda **limit: linjac.jvp_many(jnp.sin, (X2,), (batch,), **limit),
        "vjp_many": lambda **limit: linjac.vjp_many(jnp.sin, (X2,), batch, **limit),
    }
    for name, default in (("chunk_size", "chosen from memory_budget"), ("memory_budget", "16 MiB")):
        for who, call in calls.items():
            text = f"linjac.{who}: {name} must be a positive int or None ({default}), got {shown}"
            assert refusal(functools.partial(call, **{name: value}), error) == text
    text = f"linjac.linearize_many: residual_budget must be a positive int or None (half the memory), got {shown}"
    assert refusal(lambda: linjac.linearize_many(jnp.sin, X2, residual_budget=value), error) == text


STRATEGIES = "strategy must be one of 'auto', 'stored', 'recompute', got"
OPTIONS = [
    ({"strategy": "store"}, ValueError, f"{STRATEGIES} 'store'"),
    ({"strategy": None}, TypeError, f"{STRATEGIES} NoneType"),
    ({"has_aux": 1}, TypeError, "has_aux must be True or False, got int"),
    ({"jit": None}, TypeError, "jit must be True or False, got NoneType"),
]


@pytest.mark.parametrize(("options", "error", "text"), OPTIONS)
def test_options(options, error, text):
    assert refusal(lambda: linjac.linearize_many(jnp.sin, X2, **options), error) == f"linjac.linearize_many: {text}"


# What fun is given and returns ----------------------------------------------------------------------------------------


class Unhashable:
    __hash__ = None


NOTHING = "linjac.linearize_many: nothing here can move"
CAST = "only floating and complex leaves do: cast to float"
PAIR = "has_aux=True needs fun to return a pair (value, aux), got"
ARGUMENTS = {
    "primals of jvp_many": (
        lambda: linjac.jvp_many(jnp.sin, X2, (full(3, 2),)),
        [f"linjac.jvp_many: primals must be a tuple with one entry for each argument, got {S}[2]"],
        linjac.TangentError,
    ),
    "tangents of jvp_many": (
        lambda: linjac.jvp_many(jnp.sin, (X2,), full(3, 2)),
        [f"linjac.jvp_many: tangents must be a tuple with one entry for each argument, got {S}[3,2]"],
        linjac.TangentError,
    ),
    "unhashable": (
        lambda: linjac.linearize_many(lambda x, _: x, X2, Unhashable(), argnums=0),
        [
            "linjac.linearize_many: these arguments are no arrays, so they are static, but they cannot be hashed",
            "  primals[1]: Unhashable",
            "pass arrays, or something hashable",
        ],
        TypeError,
    ),
    "types": (
        lambda: linjac.linearize_many(multiply, X2, {"a": jax.ShapeDtypeStruct((2,), F)}),
        [
            "linjac.linearize_many: these arguments are types without values",
            f"  primals[1]['a']: {S}[2]",
            "pass arrays",
        ],
        TypeError,
    ),
    "integers alone": (
        lambda: linjac.linearize_many(lambda tree: X2, {"a": jnp.arange(3, dtype=jnp.int32), "b": jnp.asarray(True)}),
        [NOTHING, "  primals[0]['a']: i32[3]", "  primals[0]['b']: bool[]", CAST],
        TypeError,
    ),
    "output": (
        lambda: linjac.linearize_many(lambda x: {"a": x, "b": "123456"}, X2),
        [
            "linjac.linearize_many: fun returned something that is no array",
            "  output['b']: str",
            "return it as aux (has_aux=True)",
        ],
        TypeError,
    ),
    "aux": (
        lambda: linjac.linearize_many(lambda x: {"a": x}, X2, has_aux=True),
        [f"linjac.linearize_many: {PAIR} dict"],
        TypeError,
    ),
    "a Ref": (
        lambda: linjac.linearize_many(functools.partial(_reads, jax.new_ref(full(2))), X2),
        [
            "linjac.linearize_many: fun reads or writes a mutable Ref from outside, which has no derivative",
            "pass the value in as an argument, and return what it should become",
        ],
        TypeError,
    ),
    "no matrix": (
        lambda: linjac.linearize_many(half_complex, X2, jnp.ones(1, C))[1].as_matrix(),
        [
            "linjac.linear_fn.as_matrix: real and complex leaves on both sides: the map is linear over the reals "
            "alone and has no matrix",
            "differentiate real and imaginary parts",
        ],
        TypeError,
    ),
    "pickle": (
        lambda: pickle.dumps(made.one),
        ["linjac.Linearization: it cannot be pickled", "pickle the point, and linearize again at it"],
        TypeError,
    ),
    "measure": (
        lambda: made.one.jacobian(mode="measure"),
        [
            "linjac.linear_fn.jacobian: a linearization does not measure",
            "pass a plan of linjac.plan_jacobian(fun, mode='measure')",
        ],
        ValueError,
    ),
    "matvec of a string": (
        lambda: made.one.matvec("123456"),
        ["linjac.linear_fn.matvec: not an array", "  got str"],
        linjac.TangentError,
    ),
    "matvec of another length": (
        lambda: made.one.matvec(full(3)),
        ["linjac.linear_fn.matvec: wrong shape", f"  expected (2,), got {S}[3]"],
        linjac.TangentError,
    ),
    "rmatmat of another length": (
        lambda: made.one.rmatmat(full(5, 2)),
        ["linjac.linear_fn.rmatmat: wrong shape", f"  expected (2, k), got {S}[5,2]"],
        linjac.TangentError,
    ),
    "matvec of a complex vector": (
        lambda: made.one.matvec(full(2, dtype=C)),
        ["linjac.linear_fn.matvec: a complex vector for real leaves", f"  got {COMPLEX}[2]"],
        linjac.TangentError,
    ),
}


def _reads(ref, x):
    return x * ref[...]


@check(ARGUMENTS)
def test_arguments_and_results(name):
    call, rows, error = ARGUMENTS[name]
    assert refusal(call, error).splitlines() == rows


def test_nothing_can_move_in_one_position():
    call = lambda: linjac.linearize_many(lambda x, _: x, X2, jnp.arange(2, dtype=jnp.int32), argnums=1)
    assert refusal(call, TypeError).splitlines() == [NOTHING, "  primals[1]: i32[2]", CAST]


@pytest.mark.parametrize("jit", [True, False])
def test_has_aux_names_no_class_of_jax(jit):
    text = refusal(lambda: linjac.linearize_many(lambda x: x, X2, has_aux=True, jit=jit), TypeError)
    assert text == f"linjac.linearize_many: {PAIR} {S}[2]"


# Directions -----------------------------------------------------------------------------------------------------------


def test_no_forward_direction():
    first, *obstacles, remedy = refusal(lambda: linjac.linearize_many(called_back, X2), linjac.ModeError).splitlines()
    assert first == "linjac.linearize_many: this function has no forward direction"
    assert [row.partition(":")[0].strip() for row in obstacles] == ["linearize", "forward"]
    assert all("callback" in row for row in obstacles)
    assert remedy == "use jax.vjp, or give the function a jvp rule"


def test_no_reverse_direction():
    linear_fn = linjac.linearize_many(looped, X2)[1]
    calls = {
        "linear_fn.transpose": lambda: linear_fn.transpose(full(2)),
        "linear_fn.transpose_many": lambda: linear_fn.transpose_many(full(3, 2)),
        "linear_fn.rmatvec": lambda: linear_fn.rmatvec(full(2)),
        "vjp_many": lambda: linjac.vjp_many(looped, (X2,), full(3, 2)),
    }
    for who, call in calls.items():
        first, obstacle, remedy = refusal(call, linjac.ModeError).splitlines()
        assert first == f"linjac.{who}: this function has no reverse direction"
        assert obstacle.startswith("  reverse: ValueError: Reverse-mode differentiation does not work for lax.while")
        assert remedy == "use forward products"


def test_a_collective():
    mapped = jax.vmap(lambda x: linjac.linearize_many(lambda y: jax.lax.psum(y, "i"), x)[0], axis_name="i")
    first, where, remedy = refusal(lambda: mapped(full(3, 2)), linjac.ModeError).splitlines()
    what = "fun reduces over a mapped axis, so the two directions would answer different questions"
    assert first == f"linjac.linearize_many: {what}"
    assert where.startswith("  psum over 'i'")
    assert remedy == "linearize outside: apply linjac to the mapped function, jax.vmap(fun) or jax.shard_map(fun)"
