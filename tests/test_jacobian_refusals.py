"""The exact texts of what `linjac.jacobian` and its relatives refuse: what is wrong, the leaves by path, one remedy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import linjac
from scenarios import FULL, SHORT, C, F, array, real

LONG = "c128" if FULL else "c64"
X3 = array(real(3, seed=41))
Z3 = X3.astype(C)
INTEGERS = jnp.asarray([0, 1], jnp.int32)
HUGE = "400,000,000,000,000"


def double(x):
    return 2.0 * x


def two(x, y):
    return x * y.astype(F)


def text_of(error, call, *args, **kwargs):
    """The message of the error that a call raises."""
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    assert type(caught.value) is error
    return str(caught.value)


def lines(*rows):
    return "\n".join(rows)


# Inputs ---------------------------------------------------------------------------------------------------------------


def test_an_integer_argument():
    assert text_of(TypeError, linjac.jacobian(two, 1), X3[:2], INTEGERS) == lines(
        "linjac.jacobian: these arguments have no derivative",
        "  args[1]: i32[2], an integer or bool",
        "cast to float, leave it out of argnums, or pass allow_int=True for float0 blocks",
    )


def test_every_integer_argument_is_listed_and_five_are_shown():
    args = [jnp.zeros(i, jnp.int32) for i in range(7)]
    assert text_of(TypeError, linjac.jacobian(lambda *args: X3, range(7)), *args) == lines(
        "linjac.jacobian: these arguments have no derivative",
        *(f"  args[{i}]: i32[{i}], an integer or bool" for i in range(5)),
        "  and 2 more",
        "cast to float, leave it out of argnums, or pass allow_int=True for float0 blocks",
    )


def test_a_tree_of_integers():
    tree = {"a": INTEGERS, "b": [jnp.asarray(True)]}
    assert text_of(TypeError, linjac.value_and_jacobian(lambda tree: X3), tree) == lines(
        "linjac.value_and_jacobian: these arguments have no derivative",
        "  args[0]['a']: i32[2], an integer or bool",
        "  args[0]['b'][0]: bool[], an integer or bool",
        "cast to float, leave it out of argnums, or pass allow_int=True for float0 blocks",
    )


def constant(x):
    del x
    return X3


@pytest.mark.parametrize("value", [3, True, "sin", jnp.sin], ids=["int", "bool", "str", "callable"])
@pytest.mark.parametrize("allow_int", [False, True])
def test_a_whole_argument_that_is_no_array(value, allow_int):
    """Not `None` for an answer: as in JAX, an int is refused, and so is what can have no derivative at all."""
    if allow_int and isinstance(value, int):
        jac = linjac.jacobian(constant, allow_int=True)(value)
        assert (jac.dtype, jac.shape) == (jax.dtypes.float0, (3,))
        return
    text = text_of(TypeError, linjac.jacobian(constant, allow_int=allow_int), value)
    assert text.startswith("linjac.jacobian: ")
    assert "args[0]" in text


@pytest.mark.parametrize("allow_int", [False, True])
def test_a_prng_key_has_no_way_out_by_allow_int(allow_int):
    text = text_of(TypeError, linjac.jacobian(jax.random.normal, allow_int=allow_int), jax.random.key(0))
    assert text.startswith("linjac.jacobian: these arguments have no derivative\n  args[0]: key<fry>[], a PRNG key\n")
    assert "argnums" in text
    assert "allow_int" not in text


def test_an_unhashable_static_argument():
    assert text_of(TypeError, linjac.jacobian(lambda x, config: x), X3, config={"a": {1}}) == lines(
        "linjac.jacobian: these arguments are no arrays, so they are static, but they cannot be hashed",
        "  config['a']: set",
        "pass arrays, or something hashable",
    )


def test_a_deleted_point():
    x = array(real(3, seed=42))
    x.delete()
    text = text_of(linjac.PointError, linjac.jacobian(jnp.sin), x)
    assert text.startswith("linjac.jacobian: an array has been deleted (donated to another computation)")


def test_holomorphic_with_real_inputs():
    assert text_of(TypeError, linjac.jacobian(double, holomorphic=True), {"a": X3}["a"]) == lines(
        "linjac.jacobian: holomorphic=True needs complex inputs", f"  args[0]: {SHORT}[3]", "leave holomorphic out"
    )


# Outputs --------------------------------------------------------------------------------------------------------------


def integers(x):
    return {"n": [x.astype(jnp.int32), x > 0], "x": x}


@pytest.mark.parametrize("what", ["jacobian", "value_and_jacobian", "plan_jacobian"])
def test_integer_outputs(what):
    assert text_of(TypeError, getattr(linjac, what)(integers), X3) == lines(
        f"linjac.{what}: these outputs have no derivative",
        "  output['n'][0]: i32[3], an integer or bool",
        "  output['n'][1]: bool[3], an integer or bool",
        "return it as aux (has_aux=True)",
    )


def test_a_key_as_output_is_no_integer():
    text = text_of(TypeError, linjac.jacobian(lambda x: {"k": jax.random.key(0), "x": x}), X3)
    assert "output['k']: key<fry>[]" in text
    assert "integer" not in text
    assert "aux" in text


def test_an_output_that_is_no_array():
    text = text_of(TypeError, linjac.jacobian(lambda x: {"name": "net", "x": x}), X3)
    assert text.startswith("linjac.jacobian: fun returned something that is no array\n  output['name']: str\n")
    assert "aux" in text


def test_complex_to_complex():
    fun = lambda z: {"w": z * z, "r": z.real}
    assert text_of(TypeError, linjac.jacobian(fun), Z3) == lines(
        "linjac.jacobian: a function from complex to complex has a complex Jacobian only where it is holomorphic",
        f"  output['w']: {LONG}[3]",
        "pass holomorphic=True if it is; otherwise differentiate real and imaginary parts",
    )


def test_holomorphic_with_real_outputs():
    assert text_of(TypeError, linjac.jacobian(lambda z: [z, z.imag], holomorphic=True), Z3) == lines(
        "linjac.jacobian: holomorphic=True needs complex outputs", f"  output[1]: {SHORT}[3]", "leave holomorphic out"
    )


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("result", [lambda x: x, lambda x: {"a": x}, lambda x: (x, x, x)], ids=["one", "dict", "three"])
def test_has_aux_without_a_pair(result, jit):
    text = text_of(TypeError, linjac.jacobian(result, has_aux=True, jit=jit), X3)
    assert text.startswith("linjac.jacobian: has_aux=True needs fun to return a pair (value, aux), got ")
    assert "Tracer" not in text
    assert "ArrayImpl" not in text


def test_a_container_that_refuses_blocks():
    class Vector:
        def __init__(self, data):
            if data.ndim != 1:
                raise TypeError("only vectors")
            self.data = data

    jax.tree_util.register_pytree_node(Vector, lambda v: ((v.data,), None), lambda _, leaves: Vector(*leaves))
    with pytest.raises(TypeError, match="only vectors") as caught:
        linjac.jacobian(lambda v: v.data)(Vector(X3))
    (note,) = (note for note in caught.value.__notes__ if note.startswith("linjac.jacobian: a container class"))
    assert "Vector" in note
    assert f"{SHORT}[3,3]" in note


# Modes and plans ------------------------------------------------------------------------------------------------------


def test_a_plan_of_other_sizes():
    plan = linjac.plan_jacobian(double)(X3)
    assert text_of(ValueError, linjac.jacobian(double, mode=plan), array(real(4, seed=43))) == lines(
        "linjac.jacobian: the plan was made for 3 inputs and 3 outputs, not for 4 inputs and 4 outputs",
        "make a plan for these arguments with linjac.plan_jacobian",
    )


def test_a_matrix_of_another_shape():
    plan = linjac.plan_jacobian(double)(X3)
    want = "linjac.JacobianPlan.unflatten: expected shape (3, 3), got (2, 3)"
    assert text_of(ValueError, plan.unflatten, np.zeros((2, 3))) == want


@pytest.mark.parametrize("what", ["jacobian", "value_and_jacobian", "plan_jacobian"])
def test_a_result_that_cannot_fit(what):
    text = text_of(linjac.MemoryBudgetError, getattr(linjac, what)(double), jnp.zeros(10**7, jnp.float32))
    first, second = text.splitlines()
    assert first.startswith(f"linjac.{what}: the Jacobian is 10000000 x 10000000, {HUGE} bytes; there are ")
    assert second == "use linjac.linearize_many and its products, or linjac.jvp_many for some directions"


def _loop(x):
    return jax.lax.while_loop(lambda x: jnp.sum(x) > 9.0, lambda x: 0.5 * x, x)


def test_an_impossible_mode():
    first, second, third = text_of(linjac.ModeError, linjac.jacobian(_loop, mode="rev"), X3).splitlines()
    assert first == "linjac.jacobian: mode='rev' cannot work here"
    assert second.startswith("  a while_loop with a trip count known at run time only at ")
    assert f"test_jacobian_refusals.py:{_loop.__code__.co_firstlineno + 1}" in second
    assert "(_loop)" in second
    assert third == "use mode='fwd'"


def test_a_collective():
    mapped = jax.vmap(linjac.jacobian(lambda x: jax.lax.psum(x, "batch")), axis_name="batch")
    rows = text_of(linjac.ModeError, mapped, jnp.stack([X3, X3])).splitlines()
    what = "linjac.jacobian: fun reduces over a mapped axis, so forward and reverse mode answer different questions"
    assert rows[0] == what
    assert rows[1].startswith("  psum over 'batch'")
    where = "differentiate outside: apply linjac to the mapped function, jax.vmap(fun) or jax.shard_map(fun)"
    assert rows[2] == where


# Options --------------------------------------------------------------------------------------------------------------

CHUNK = "chunk_size must be a positive int or None (chosen from memory_budget)"
BUDGET = "memory_budget must be a positive int or None (16 MiB)"
MODES = "'auto', 'fwd', 'rev', 'measure'"
OPTIONS = [
    ({"mode": "forward"}, ValueError, f"mode must be one of {MODES} or a JacobianPlan, got 'forward'"),
    ({"layout": "dense"}, ValueError, "layout must be one of 'blocks', 'matrix', got 'dense'"),
    ({"chunk_size": 0}, ValueError, f"{CHUNK}, got 0"),
    ({"chunk_size": -3}, ValueError, f"{CHUNK}, got -3"),
    ({"chunk_size": True}, TypeError, f"{CHUNK}, got True"),
    ({"chunk_size": 1.5}, TypeError, f"{CHUNK}, got 1.5"),
    ({"chunk_size": "3"}, TypeError, f"{CHUNK}, got str"),
    ({"memory_budget": 0}, ValueError, f"{BUDGET}, got 0"),
    ({"memory_budget": "3 MiB"}, TypeError, f"{BUDGET}, got str"),
    ({"has_aux": "yes"}, TypeError, "has_aux must be True or False, got str"),
    ({"holomorphic": None}, TypeError, "holomorphic must be True or False, got NoneType"),
    ({"allow_int": 1}, TypeError, "allow_int must be True or False, got int"),
]


@pytest.mark.parametrize("what", ["jacobian", "value_and_jacobian", "plan_jacobian"])
@pytest.mark.parametrize(("options", "error", "text"), OPTIONS, ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_options(what, options, error, text):
    """Refused where they are given, before there is a point."""
    assert text_of(error, getattr(linjac, what), double, **options) == f"linjac.{what}: {text}"


def test_jit_must_be_a_flag():
    assert text_of(TypeError, linjac.jacobian, double, jit=1) == "linjac.jacobian: jit must be True or False, got int"


@pytest.mark.parametrize("option", ["mode", "layout"])
@pytest.mark.parametrize("value", [None, 3, np.ones(2), ["fwd"]], ids=["none", "int", "array", "list"])
def test_a_choice_of_another_kind(option, value):
    with pytest.raises((TypeError, ValueError), match=rf"linjac\.jacobian: {option} must be one of"):
        linjac.jacobian(double, **{option: value})


def test_fun():
    assert text_of(TypeError, linjac.jacobian, 3) == "linjac.jacobian: fun must be callable, got int"


ARGNUMS = [
    (3, ValueError, "argnums=3 is out of range for 2 positional arguments"),
    (-3, ValueError, "argnums=-3 is out of range for 2 positional arguments"),
    ((0, 2), ValueError, "argnums=2 is out of range for 2 positional arguments"),
    ((), ValueError, "argnums names no position, so there is nothing to differentiate"),
    ((1, 1), ValueError, "argnums names a position twice: (1, 1)"),
    (1.0, TypeError, "argnums must be an int or a sequence of ints, got float"),
    (True, TypeError, "argnums must be an int or a sequence of ints, got bool"),
    ("x", TypeError, "argnums must hold ints, got str"),
    ((0, None), TypeError, "argnums must hold ints, got NoneType"),
]


@pytest.mark.parametrize(
    ("argnums", "error", "text"), ARGNUMS, ids=lambda v: repr(v) if not isinstance(v, type) else ""
)
def test_argnums(argnums, error, text):
    assert text_of(error, linjac.jacobian(two, argnums), X3, X3) == f"linjac.jacobian: {text}"


# Never contents -------------------------------------------------------------------------------------------------------


def test_no_message_shows_contents():
    secret = jnp.asarray([123456, 123456], jnp.int32)
    texts = [
        text_of(TypeError, linjac.jacobian(two, (0, 1)), array([123456.0] * 2), secret),
        text_of(TypeError, linjac.jacobian(double, holomorphic=True), array([123456.0], F)),
        text_of(TypeError, linjac.jacobian(lambda x: x * x), array([123456.0 + 1j])),
        text_of(ValueError, linjac.plan_jacobian(double)(X3).unflatten, np.full(4, 123456)),
    ]
    assert not any("123456" in text for text in texts)
