"""Every refusal of issue 2: its class, the leaf it names, expected and got, and that it never prints contents.

The exact texts are tested elsewhere.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import linjac
from scenarios import FULL, SHORT, F, array, real

OTHER, OTHER_SHORT = (jnp.float32, "f32") if FULL else (jnp.bfloat16, "bf16")
COMPLEX_SHORT = "c128" if FULL else "c64"
SECRET = 123456.789
OPTION = (TypeError, ValueError)
POINT = {
    "layers": [{"w": array(real(2, 3, seed=91)), "b": array(real(2, seed=92))}],
    "scale": array(0.5),
    "index": jnp.asarray([0, 1], jnp.int32),
}


def model(tree):
    layer = tree["layers"][0]
    return {"out": jnp.sum(layer["w"], 1) * layer["b"][tree["index"]], "scale": tree["scale"] ** 2}


@pytest.fixture(scope="module")
def linear_fn():
    return linjac.linearize_many(model, POINT)[1]


def tangent(**changes):
    layer = {"w": array(np.full((2, 3), SECRET)), "b": array(np.full(2, SECRET))}
    layer |= {k: v for k, v in changes.items() if k in ("w", "b")}
    tree = {"layers": [layer], "scale": array(SECRET), "index": None}
    return tree | {k: v for k, v in changes.items() if k not in ("w", "b")}


def refused(call, *args, error=linjac.TangentError, says=(), **kwargs):
    """The text of the refusal, after the checks that hold for all of them."""
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    text = str(caught.value)
    assert text.startswith("linjac."), text
    assert "123456" not in text, text
    assert "1.23456" not in text, text
    for word in says:
        assert word in text, (word, text)
    return text


def full(*shape, dtype=F):
    return array(np.full(shape, 123456), dtype)


# Classes --------------------------------------------------------------------------------------------------------------


def test_classes_of_errors():
    assert issubclass(linjac.TangentError, TypeError)
    assert issubclass(linjac.TangentError, ValueError)
    assert issubclass(linjac.PointError, ValueError)
    assert issubclass(linjac.ModeError, TypeError)
    assert issubclass(linjac.ModeError, ValueError)
    assert issubclass(linjac.PerformanceWarning, UserWarning)


# Tangents -------------------------------------------------------------------------------------------------------------

LEAVES = {
    "wrong_shape": ({"b": full(3)}, ["['b']", f"{SHORT}[2]", f"{SHORT}[3]"]),
    "transposed": ({"w": full(3, 2)}, ["['w']", f"{SHORT}[2,3]", f"{SHORT}[3,2]"]),
    "would_broadcast": ({"b": full(1)}, ["['b']", f"{SHORT}[2]", f"{SHORT}[1]"]),
    "scalar_would_broadcast": ({"b": full()}, ["['b']", f"{SHORT}[2]", f"{SHORT}[]"]),
    "python_float_would_broadcast": ({"b": SECRET}, ["['b']", f"{SHORT}[2]"]),
    "one_for_a_scalar": ({"scale": full(1)}, ["['scale']", f"{SHORT}[]", f"{SHORT}[1]"]),
    "other_float": ({"b": full(2, dtype=OTHER)}, ["['b']", f"{SHORT}[2]", f"{OTHER_SHORT}[2]"]),
    "bfloat16": ({"b": full(2, dtype=jnp.bfloat16)}, ["['b']", f"{SHORT}[2]", "bf16[2]"]),
    "integer": ({"b": full(2, dtype=jnp.int32)}, ["['b']", f"{SHORT}[2]", "i32[2]"]),
    "complex": ({"b": array([SECRET + 1j, SECRET])}, ["['b']", f"{SHORT}[2]", f"{COMPLEX_SHORT}[2]"]),
    "integer_leaf": ({"index": full(2, dtype=jnp.int32)}, ["['index']", "i32[2]"]),
    "float_at_integer_leaf": ({"index": full(2)}, ["['index']", f"{SHORT}[2]"]),
    "a_string": ({"b": "123456"}, ["['b']", f"{SHORT}[2]"]),
}


@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_that_does_not_match(linear_fn, name):
    changes, says = LEAVES[name]
    refused(linear_fn, tangent(**changes), says=says)


@pytest.mark.parametrize("name", ["wrong_shape", "other_float", "integer_leaf", "would_broadcast", "complex"])
def test_a_leaf_that_does_not_match_in_a_batch(linear_fn, name):
    changes, says = LEAVES[name]
    batched = jax.tree.map(lambda x: jnp.stack([x, x, x]), tangent(**changes))
    refused(linear_fn.many, batched, says=says[:1])


@pytest.mark.parametrize("settings", [{"jit": False}, {"strategy": "recompute"}], ids=["op_by_op", "recompute"])
def test_other_ways_refuse_the_same(settings):
    linear_fn = linjac.linearize_many(model, POINT, **settings)[1]
    for changes, says in LEAVES.values():
        refused(linear_fn, tangent(**changes), says=says)


def test_every_bad_leaf_is_named(linear_fn):
    text = refused(linear_fn, tangent(b=full(3), w=full(1, 3), scale=full(4)), says=["['b']", "['w']", "['scale']"])
    assert text.count(SHORT) >= 6


def test_five_bad_leaves_are_shown():
    point = [array(real(2, seed=i)) for i in range(9)]
    linear_fn = linjac.linearize_many(lambda xs: sum(xs[1:], xs[0]), point)[1]
    text = refused(linear_fn, [full(3)] * 9)
    assert text.count(f"{SHORT}[3]") == 5
    assert "4" in text.replace(f"{SHORT}[3]", "")


def test_refusals_under_jit_and_vmap(linear_fn):
    bad = tangent(b=full(3))
    refused(jax.jit(lambda f, t: f(t)), linear_fn, bad, says=["['b']", f"{SHORT}[3]"])
    batched = jax.tree.map(lambda x: jnp.stack([x, x]), bad)
    refused(jax.vmap(linear_fn), batched, says=["['b']", f"{SHORT}[3]"])


# Structures -----------------------------------------------------------------------------------------------------------


def without(name):
    tree = tangent()
    (tree if name in tree else tree["layers"][0]).pop(name)
    return tree


STRUCTURES = {
    "missing_leaf": (without("b"), ["'b'"]),
    "missing_top_leaf": (without("scale"), ["'scale'"]),
    "extra_leaf": (tangent() | {"bias": full(2)}, ["'bias'"]),
    "renamed_leaf": (without("scale") | {"scales": full()}, ["'scale"]),
    "longer_list": (tangent() | {"layers": tangent()["layers"] * 2}, ["layers"]),
    "tuple_for_list": (tangent() | {"layers": tuple(tangent()["layers"])}, ["layers"]),
    "none_for_a_leaf": (tangent(b=None), ["'b'"]),
    "flat_vector": (full(9), [f"{SHORT}[9]"]),
    "other_tree": ([full(2), full(3)], []),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_another_structure(linear_fn, name):
    tree, says = STRUCTURES[name]
    refused(linear_fn, tree, says=says)


@pytest.mark.parametrize("name", ["missing_leaf", "extra_leaf", "flat_vector"])
def test_another_structure_in_a_batch(linear_fn, name):
    tree, says = STRUCTURES[name]
    refused(
        linear_fn.many, jax.tree.map(lambda x: jnp.stack([x, x]), tree), says=says[:1] if name != "flat_vector" else ()
    )


def multiply(x, y):
    return x * y


@pytest.fixture(scope="module")
def of_two():
    return linjac.linearize_many(multiply, array([1.0, 2.0]), array([3.0, 4.0]))[1]


def test_tuple_wrapped_tangents(of_two):
    refused(of_two, (full(2), full(2)), says=["linear_fn(*tangents)"])
    refused(of_two.many, (full(3, 2), full(3, 2)), says=["*"])
    one = linjac.linearize_many(jnp.sin, array([1.0]))[1]
    refused(one, (full(1),), says=["linear_fn(*tangents)"])


def test_number_of_tangents(of_two):
    refused(of_two, full(2), says=["tangents[1]"])
    refused(of_two, full(2), full(2), full(2), says=["tangents[2]"])
    refused(of_two, says=["tangents[0]", "tangents[1]"])


def test_the_position_is_named(of_two):
    refused(of_two, full(2), full(3), says=["tangents[1]", f"{SHORT}[2]", f"{SHORT}[3]"])


def test_a_tangent_for_a_position_that_is_held():
    linear_fn = linjac.linearize_many(multiply, array([1.0, 2.0]), array([3.0, 4.0]), argnums=1)[1]
    refused(linear_fn, full(2), full(2))


# Batches --------------------------------------------------------------------------------------------------------------


def batch(size, **changes):
    tree = tangent(**changes)
    return jax.tree.map(lambda x: jnp.stack([x] * size), tree)


def test_a_batch_for_the_single_call(linear_fn, of_two):
    refused(linear_fn, batch(3), says=[".many"])
    refused(of_two, full(5, 2), full(5, 2), says=[".many"])


def test_a_batch_of_cotangents_for_the_single_call(of_two):
    refused(of_two.transpose, full(5, 2), says=[".transpose_many"])


def test_a_single_tangent_for_the_batch_call(linear_fn, of_two):
    refused(linear_fn.many, tangent(), says=["['scale']"])
    refused(of_two.many, full(2), full(2))
    refused(of_two.transpose_many, full(2))


def test_leading_axes_that_disagree(linear_fn, of_two):
    mixed = batch(3)
    mixed["layers"][0]["b"] = full(4, 2)
    refused(linear_fn.many, mixed, says=["['b']", "3", "4"])
    refused(of_two.many, full(3, 2), full(4, 2), says=["3", "4"])


def test_functional_forms_refuse_the_same():
    x = array([1.0, 2.0])
    refused(linjac.jvp_many, jnp.sin, (x,), (full(4, 3),), says=[f"{SHORT}["])
    refused(linjac.jvp_many, jnp.sin, (x,), (full(2),))
    refused(linjac.jvp_many, jnp.sin, (x,), (full(4, 2), full(4, 2)))
    refused(linjac.vjp_many, jnp.sin, (x,), full(4, 3), says=[f"{SHORT}["])
    refused(linjac.vjp_many, jnp.sin, (x,), full(4, 2, dtype=OTHER), says=[OTHER_SHORT])


@pytest.mark.parametrize("chunk_size", [0, -1, 2.5, True, "3"])
def test_chunk_sizes_that_are_refused(of_two, chunk_size):
    x, bad = array([1.0, 2.0]), {"chunk_size": chunk_size, "error": OPTION, "says": ["chunk_size"]}
    refused(of_two.many, full(3, 2), full(3, 2), **bad)
    refused(of_two.transpose_many, full(3, 2), **bad)
    refused(linjac.jvp_many, jnp.sin, (x,), (full(3, 2),), **bad)
    refused(linjac.vjp_many, jnp.sin, (x,), full(3, 2), **bad)


@pytest.mark.parametrize("memory_budget", [-1, 0.5j, "1 GB", True])
def test_memory_budgets_that_are_refused(of_two, memory_budget):
    refused(
        of_two.many,
        full(3, 2),
        full(3, 2),
        memory_budget=memory_budget,
        error=OPTION,
        says=["memory_budget"],
    )


# Cotangents -----------------------------------------------------------------------------------------------------------

COTANGENTS = {
    "wrong_shape": ({"out": full(3), "scale": full()}, ["['out']", f"{SHORT}[2]", f"{SHORT}[3]"]),
    "wrong_dtype": ({"out": full(2, dtype=OTHER), "scale": full()}, ["['out']", f"{OTHER_SHORT}[2]"]),
    "would_broadcast": ({"out": full(1), "scale": full()}, ["['out']", f"{SHORT}[1]"]),
    "missing": ({"out": full(2)}, ["'scale'"]),
    "a_list": ([SECRET, SECRET], []),
    "a_numpy_object": (np.array([SECRET, "123456"], object), []),
    "a_flat_vector": (full(3), [f"{SHORT}[3]"]),
    "shaped_like_the_input": (tangent(), []),
    "none": (None, []),
}


@pytest.mark.parametrize("name", COTANGENTS)
def test_a_cotangent_that_does_not_match(linear_fn, name):
    cotangent, says = COTANGENTS[name]
    refused(linear_fn.transpose, cotangent, says=says)


def test_a_tuple_where_one_cotangent_is_due(of_two):
    refused(of_two.transpose, (full(2),))


# Points ---------------------------------------------------------------------------------------------------------------


def test_a_moved_point(linear_fn):
    linear_fn.check_point(POINT)
    moved = jax.tree.map(lambda x: x, POINT)
    moved["layers"][0]["b"] = full(2)
    refused(linear_fn.check_point, moved, error=linjac.PointError, says=["['b']"])


def test_a_held_leaf_that_moved(linear_fn):
    refused(
        linear_fn.check_point,
        POINT | {"index": jnp.asarray([1, 1], jnp.int32)},
        error=linjac.PointError,
        says=["['index']"],
    )


def test_a_point_in_a_held_position_that_moved():
    x, y = array([1.0, 2.0]), array([3.0, 4.0])
    linear_fn = linjac.linearize_many(multiply, x, y, argnums=0)[1]
    linear_fn.check_point(x, y)
    refused(linear_fn.check_point, x, full(2), error=linjac.PointError, says=["[1]"])


def test_nan_is_equal_to_nan():
    x = array([np.nan, 1.0])
    linear_fn = linjac.linearize_many(jnp.sin, x)[1]
    linear_fn.check_point(array([np.nan, 1.0]))
    refused(linear_fn.check_point, array([np.nan, 2.0]), error=linjac.PointError)


def test_a_point_of_another_shape_or_structure(linear_fn):
    refused(linear_fn.check_point, full(2), error=(linjac.PointError, linjac.TangentError))
    refused(linear_fn.check_point, POINT, POINT, error=(linjac.PointError, TypeError))


def test_tracers_cannot_be_compared():
    linear_fn = linjac.linearize_many(jnp.sin, array([1.0]))[1]
    with pytest.raises((TypeError, ValueError), match=r"(?i)trac"):
        jax.jit(lambda x: linear_fn.check_point(x))(array([1.0]))


def test_made_under_vmap_and_used_without_it():
    linear_fns = jax.vmap(lambda x: linjac.linearize_many(jnp.sin, x)[1])(array(real(4, 3)))
    refused(linear_fns, full(3), error=OPTION, says=["vmap"])
    refused(linear_fns.transpose, full(3), error=OPTION, says=["vmap"])
    refused(linear_fns.many, full(4, 3), error=OPTION, says=["vmap"])


def identity_and_square(x):
    return x * jnp.sin(x)


GONE = {"error": (linjac.PointError, RuntimeError)}


def test_a_deleted_point_says_so():
    x = array([1.0, 2.0]) + 0
    linear_fn = linjac.linearize_many(identity_and_square, x, strategy="recompute")[1]
    x.delete()
    assert re.search("deleted|donated", refused(linear_fn, full(2), **GONE))
    assert re.search("deleted|donated", refused(linear_fn.transpose, full(2), **GONE))


def test_a_point_that_is_deleted_already():
    x = array([1.0, 2.0]) + 0
    x.delete()
    assert re.search("deleted|donated", refused(linjac.linearize_many, identity_and_square, x, **GONE))


# Options --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argnums", [2, -3, (0, 2), (0, -3)])
def test_argnums_out_of_range(argnums):
    x = array([1.0])
    refused(linjac.linearize_many, multiply, x, x, argnums=argnums, error=OPTION, says=["argnums", "2"])


@pytest.mark.parametrize("argnums", ["x", 0.5, (0, "y"), True, (0, 0), (0, -2)])
def test_argnums_of_the_wrong_kind(argnums):
    x = array([1.0])
    refused(linjac.linearize_many, multiply, x, x, argnums=argnums, error=OPTION, says=["argnums"])


def test_numpy_integers_are_argnums():
    x = array([2.0])
    assert linjac.linearize_many(multiply, x, 3 * x, argnums=np.int64(1))[1](x).tolist() == [4.0]
    assert linjac.linearize_many(multiply, x, 3 * x, argnums=(np.int32(-1),))[1](x).tolist() == [4.0]


@pytest.mark.parametrize("fun", [None, 3, "sin", array([1.0])])
def test_fun_that_is_not_callable(fun):
    refused(linjac.linearize_many, fun, array([1.0]), error=TypeError, says=["callable"])
    refused(linjac.jvp_many, fun, (array([1.0]),), (full(2, 1),), error=TypeError, says=["callable"])


def test_a_primal_that_is_a_string():
    refused(linjac.linearize_many, multiply, array([1.0]), "123456", error=OPTION, says=["1"])


def test_an_unhashable_static_argument_is_refused():
    class Unhashable:
        __hash__ = None

    refused(
        linjac.linearize_many,
        lambda x, _: x,
        array([1.0]),
        Unhashable(),
        argnums=0,
        error=OPTION,
        says=["1"],
    )


@pytest.mark.parametrize("strategy", ["store", 1, None, ""])
def test_strategies_that_are_refused(strategy):
    refused(
        linjac.linearize_many,
        jnp.sin,
        array([1.0]),
        strategy=strategy,
        error=OPTION,
        says=["strategy"],
    )


@pytest.mark.parametrize("budget", [-1, "1 GB", True])
def test_residual_budgets_that_are_refused(budget):
    bad = {"residual_budget": budget, "error": OPTION, "says": ["residual_budget"]}
    refused(linjac.linearize_many, jnp.sin, array([1.0]), **bad)


def test_primals_of_the_functional_forms_are_a_tuple():
    with pytest.raises((TypeError, ValueError)):
        linjac.jvp_many(jnp.sin, array([1.0, 2.0]), (full(2, 2),))


# Missing directions ---------------------------------------------------------------------------------------------------


def called_back(x):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def test_a_missing_forward_direction_is_refused_at_construction():
    text = refused(linjac.linearize_many, called_back, array([1.0]), error=linjac.ModeError)
    assert "callback" in text.lower()


def test_jax_error_is_chained():
    with pytest.raises(linjac.ModeError) as caught:
        linjac.linearize_many(called_back, array([1.0]))
    assert caught.value.__cause__ is not None


def looped(x):
    return jax.lax.while_loop(lambda c: jnp.sum(c) < 50.0, lambda c: c * 2, x)


@pytest.mark.parametrize(
    "settings", [{}, {"strategy": "recompute"}, {"jit": False}], ids=["stored", "recompute", "op_by_op"]
)
def test_a_missing_reverse_direction_is_refused_at_its_first_use(settings):
    linear_fn = linjac.linearize_many(looped, array([1.0, 2.0]), **settings)[1]
    assert linear_fn(array([1.0, 1.0])).tolist() == [32.0, 32.0]
    for use, cotangents in ((linear_fn.transpose, full(2)), (linear_fn.transpose_many, full(3, 2))):
        text = refused(use, cotangents, error=linjac.ModeError)
        assert "while" in text
    assert linear_fn(array([1.0, 1.0])).tolist() == [32.0, 32.0]


def test_a_missing_reverse_direction_of_the_functional_form():
    refused(linjac.vjp_many, looped, (array([1.0, 2.0]),), full(3, 2), error=linjac.ModeError)


def test_errors_of_fun_pass_through():
    def broken(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        linjac.linearize_many(broken, array([1.0]))
