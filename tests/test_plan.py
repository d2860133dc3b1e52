"""Plans: what they say, what they choose, what they refuse, and that memory stays within bounds."""

import dataclasses
import functools
import re
import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import linjac
from dense import Counted, compiles, largest, matrix_of
from scenarios import BY_NAME, SCENARIOS, TOLERANCE, C, F, Pair, array, cplx, real

close = functools.partial(np.testing.assert_allclose, rtol=TOLERANCE, atol=TOLERANCE)
BYTES = jnp.dtype(F).itemsize
BOTH = ["fwd", "rev"]
OTHER = {"fwd": "rev", "rev": "fwd"}
X3 = array(real(3, seed=51, low=0.3))
NX3 = np.asarray(X3)
TALL, WIDE = array(real(64, 3, seed=52)), array(real(3, 64, seed=53))
X64 = array(real(64, seed=54))


def tall(x):
    return jnp.sin(TALL @ x)


def wide(x):
    return jnp.sin(WIDE @ x)


def square(x):
    return x * jnp.sin(x)


# What is chosen -------------------------------------------------------------------------------------------------------


def test_fewer_inputs_push_forward():
    plan = linjac.plan_jacobian(tall)(X3)
    assert (plan.mode, plan.m, plan.n, plan.sweeps) == ("fwd", 64, 3, 3)


def test_fewer_outputs_pull_back():
    plan = linjac.plan_jacobian(wide)(X64)
    assert (plan.mode, plan.m, plan.n, plan.sweeps) == ("rev", 3, 64, 3)


def test_a_gradient_is_one_reverse_sweep():
    plan = linjac.plan_jacobian(lambda x: jnp.sum(jnp.sin(x)))(array(real(200, seed=55)))
    assert (plan.mode, plan.m, plan.sweeps) == ("rev", 1, 1)


def test_sizes_count_only_what_moves():
    """Held arguments and integer leaves are no inputs."""
    tree = {"x": X3, "index": jnp.zeros(500, jnp.int32)}
    plan = linjac.plan_jacobian(lambda tree, batch: batch @ tree["x"])(tree, TALL)
    assert (plan.mode, plan.m, plan.n) == ("fwd", 64, 3)


def test_close_sizes_advise_to_measure():
    advice = "consider mode='measure'"
    assert any(advice in note for note in linjac.plan_jacobian(square)(X3).notes)
    assert advice in str(linjac.plan_jacobian(square)(X3))
    for fun, x in ((tall, X3), (wide, X64)):
        assert not any(advice in note for note in linjac.plan_jacobian(fun)(x).notes)
    assert not any(advice in note for note in linjac.plan_jacobian(square, mode="rev")(X3).notes)


@pytest.mark.parametrize("mode", BOTH)
def test_an_explicit_mode_is_obeyed(mode):
    for fun, x in ((tall, X3), (wide, X64), (square, X3)):
        assert linjac.plan_jacobian(fun, mode=mode)(x).mode == mode


def test_one_complex_end_is_seeded_at_the_real_one():
    """Two real sweeps for each direction otherwise."""
    into = array(cplx(3, seed=56))
    assert linjac.plan_jacobian(lambda x: jnp.exp(x.astype(C)))(X3).mode == "fwd"
    assert linjac.plan_jacobian(lambda z: jnp.abs(z) ** 2)(into).mode == "rev"
    plan = linjac.plan_jacobian(lambda x: jnp.exp(x.astype(C)), mode="rev")(X3)
    assert (plan.sweeps, plan.m) == (6, 3)


def test_a_tie_through_a_scan_is_pushed_forward():
    """Forward keeps nothing of the steps; a dense tie outside a scan is pulled back."""
    W = jnp.eye(3)

    def looped(x):
        return jax.lax.scan(lambda c, _: (jnp.tanh(W @ c), None), x, None, length=4)[0]

    assert linjac.plan_jacobian(looped)(X3).mode == "fwd"
    assert linjac.plan_jacobian(lambda x: W @ jnp.tanh(W @ x))(X3).mode == "rev"
    close(linjac.jacobian(looped)(X3), jax.jacrev(looped)(X3))


@pytest.mark.parametrize("scenario", [pytest.param(s, id=s.name) for s in SCENARIOS if not (s.reverse and s.forward)])
def test_what_only_one_mode_can_do_is_done_in_that_mode(scenario):
    """For `custom_vjp` forward is still possible, through the transposed pullback."""
    plan = linjac.plan_jacobian(scenario.fun)(*scenario.primals)
    assert plan.mode == ("fwd" if scenario.forward else "rev")
    assert dict(plan.ruled_out).keys() == (set() if scenario.reverse else {"rev"})


def test_a_custom_vjp_is_pulled_back_and_says_so():
    scenario = BY_NAME["custom_vjp"]
    plan = linjac.plan_jacobian(scenario.fun)(*scenario.primals)
    assert any("custom_vjp" in note for note in plan.notes)
    plan = linjac.plan_jacobian(scenario.fun, mode="fwd")(*scenario.primals)
    assert plan.mode == "fwd"
    assert any("transposed pullback" in note for note in plan.notes)


# What is impossible ---------------------------------------------------------------------------------------------------


def loop_forward(x):
    """A trip count known at run time only."""
    steps = jnp.where(x[0] > 0, 2, 3)
    return jax.lax.while_loop(lambda c: c[0] < steps, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))[1]


@jax.custom_vjp
def pull_by_loop(x):
    """A custom_vjp whose backward rule is linear, but cannot be transposed."""
    return 3.0 * x


def _pull_by_loop(x, c):
    def body(carry):
        return carry[0] + 1, carry[1] * 3.0

    return (jax.lax.while_loop(lambda carry: carry[0] < jnp.where(x[0] > 99, 2, 1), body, (0, c))[1],)


pull_by_loop.defvjp(lambda x: (3.0 * x, x), _pull_by_loop)


@jax.custom_batching.custom_vmap
def own_batching(x):
    return jnp.cos(x)


@own_batching.def_vmap
def _own_batching(axis_size, in_batched, x):
    del axis_size
    return jnp.cos(x), in_batched[0]


def neither(x):
    """A loop that cannot be pulled back around a rule that cannot be pushed forward."""
    return loop_forward(pull_by_loop(x))


def called_back(x):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")


def line_of(fun):
    return fun.__code__.co_firstlineno


OBSTACLES = {"loop": (loop_forward, "rev", "while"), "custom_vmap": (lambda x: own_batching(x), "rev", "custom_vmap")}


@pytest.mark.parametrize("name", OBSTACLES)
def test_what_is_ruled_out_is_named_with_its_place(name):
    fun, mode, word = OBSTACLES[name]
    plan = linjac.plan_jacobian(fun)(X3)
    assert plan.mode == OTHER[mode]
    (ruled,) = plan.ruled_out
    assert ruled[0] == mode
    assert word in ruled[1]
    assert "test_plan.py:" in ruled[1]
    assert re.search(r"(reverse|forward) ruled out", str(plan))
    if name == "loop":
        place = int(re.search(r"test_plan\.py:(\d+)", ruled[1])[1])
        assert line_of(loop_forward) < place < line_of(loop_forward) + 5
    close(linjac.jacobian(fun)(X3), jax.jacfwd(fun)(X3))


BYSTANDERS = {
    "custom_jvp": lambda x: loop_forward(jax.nn.relu(x)),
    "callback": lambda x: loop_forward(x * called_back(jax.lax.stop_gradient(x))),
    "held_loop": lambda x: own_batching(x) * jax.lax.stop_gradient(loop_forward(x)),
}


@pytest.mark.parametrize("name", BYSTANDERS)
def test_the_obstacle_is_blamed_and_no_bystander(name):
    fun = BYSTANDERS[name]
    ((mode, reason),) = linjac.plan_jacobian(fun)(X3).ruled_out
    assert mode == "rev"
    assert ("custom_vmap" if name == "held_loop" else "while_loop with a trip count") in reason


@pytest.mark.parametrize("name", OBSTACLES)
@pytest.mark.parametrize("jit", [True, False])
def test_an_impossible_mode_is_refused_with_the_other_as_remedy(name, jit):
    fun, mode, word = OBSTACLES[name]
    with pytest.raises(linjac.ModeError) as caught:
        linjac.jacobian(fun, mode=mode, jit=jit)(X3)
    text = str(caught.value)
    assert text.startswith(f"linjac.jacobian: mode={mode!r} cannot work here")
    assert text.endswith(f"use mode={OTHER[mode]!r}")
    assert word in text
    assert "test_plan.py:" in text


def pulled(x):
    return pull_by_loop(jnp.sin(x))


def test_an_impossible_forward_mode():
    plan = linjac.plan_jacobian(pulled)(X3)
    assert plan.mode == "rev"
    assert dict(plan.ruled_out).keys() == {"fwd"}
    close(linjac.jacobian(pulled)(X3), 3 * np.diag(np.cos(NX3)))
    with pytest.raises(
        linjac.ModeError, match=r"mode='fwd' cannot work here[^$]*custom_vjp[^$]*use mode='rev'"
    ) as info:
        linjac.jacobian(pulled, mode="fwd")(X3)
    assert "test_plan.py:" in str(info.value)
    with pytest.raises(linjac.ModeError, match="custom_vjp") as info:
        linjac.jacobian(pull_by_loop, mode="fwd")(X3)
    assert "/_tracing.py" not in str(info.value)


@pytest.mark.parametrize("what", ["jacobian", "value_and_jacobian", "plan_jacobian"])
@pytest.mark.parametrize("mode", ["auto", "fwd", "rev"])
def test_no_mode_at_all_names_every_obstacle(what, mode):
    with pytest.raises(linjac.ModeError) as caught:
        getattr(linjac, what)(neither, mode=mode)(X3)
    text = str(caught.value)
    assert text.startswith(f"linjac.{what}: no mode works for this function")
    (forward,) = re.findall(r"forward: .*", text)
    (reverse,) = re.findall(r"reverse: .*", text)
    assert "custom_vjp at " in forward
    assert f"test_plan.py:{line_of(neither) + 2}" in forward
    assert "while_loop with a trip count known at run time only at " in reverse
    assert f"test_plan.py:{line_of(loop_forward) + 3}" in reverse


@pytest.mark.parametrize("mode", ["auto", "fwd", "rev"])
@pytest.mark.parametrize("jit", [True, False])
def test_a_callback_without_a_rule_has_no_mode(mode, jit):
    with pytest.raises(linjac.ModeError, match="callback") as caught:
        linjac.jacobian(called_back, mode=mode, jit=jit)(X3)
    assert "test_plan.py:" in str(caught.value)


def test_availability_is_decided_before_anything_runs():
    """An exception, not half a result: the loop is not run and nothing is compiled."""
    jac = linjac.jacobian(loop_forward, mode="rev")
    with pytest.raises(linjac.ModeError):
        jac(X3)
    with compiles(at_most=0), pytest.raises(linjac.ModeError):
        jac(X3)


# Collectives ----------------------------------------------------------------------------------------------------------

COLLECTIVES = {
    "psum": lambda x: x * jax.lax.psum(x, "i"),
    "pmean": lambda x: jax.lax.pmean(jnp.sin(x), "i"),
    "all_gather": lambda x: jax.lax.all_gather(x, "i") ** 2,
    "in_a_scan": lambda x: jax.lax.scan(lambda c, _: (jax.lax.psum(c, "i"), None), x, None, length=2)[0],
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_over_a_mapped_axis_is_refused(name):
    xs = jnp.stack([X3, 2 * X3])
    for mode in ("auto", "fwd", "rev"):
        jac = linjac.jacobian(COLLECTIVES[name], mode=mode)
        with pytest.raises(linjac.ModeError, match=r"mapped axis[^$]*differentiate outside") as caught:
            jax.vmap(jac, axis_name="i")(xs)
        assert "test_plan.py:" in str(caught.value)


def test_a_collective_in_shard_map_is_refused():
    mesh = jax.make_mesh((2,), ("i",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("i")
    mapped = jax.shard_map(linjac.jacobian(COLLECTIVES["psum"]), mesh=mesh, in_specs=spec, out_specs=spec)
    with pytest.raises(linjac.ModeError, match="differentiate outside"):
        mapped(array(real(4, seed=57)))


def test_a_collective_outside_or_within_is_none():
    """Of a mapped function the Jacobian is well defined; an index is no reduction."""
    xs = jnp.stack([X3, 2 * X3])
    inside = jax.vmap(COLLECTIVES["psum"], axis_name="i")
    for mode in BOTH:
        close(linjac.jacobian(inside, mode=mode)(xs), jax.jacfwd(inside)(xs))
    indexed = jax.vmap(linjac.jacobian(lambda x: x * (1 + jax.lax.axis_index("i")).astype(F)), axis_name="i")
    close(indexed(xs)[1], 2 * np.eye(3))
    summed = jax.vmap(lambda x: jax.lax.psum(linjac.jacobian(square)(x), "i"), axis_name="i")(xs)
    close(summed[0], sum(jax.jacfwd(square)(x) for x in xs))


# What a plan says -----------------------------------------------------------------------------------------------------


def test_the_sentence():
    weights = array(real(2048, 8, seed=58))
    plan = linjac.plan_jacobian(lambda x: jnp.tanh(weights @ x))(array(real(8, seed=59)))
    first = str(plan).splitlines()[0]
    size = {4: "64 KiB", 8: "128 KiB"}[BYTES]
    pattern = (
        r"8 forward sweeps in 1 chunk instead of 2048 reverse sweeps: 8 inputs, 2048 outputs; "
        rf"result {size}, scratch [\d.]+ (B|KiB|MiB); reverse possible"
    )
    assert re.fullmatch(pattern, first), first


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"mode": "rev", "chunk_size": 16},
            "64 reverse sweeps in 4 chunks instead of 3 forward sweeps: 3 inputs, 64 out",
        ),
        ({"chunk_size": 1}, "3 forward sweeps in 3 chunks instead of 64 reverse sweeps"),
    ],
)
def test_the_sentence_of_other_plans(settings, says):
    text = str(linjac.plan_jacobian(tall, **settings)(X3))
    assert text.startswith(says)
    assert "forward possible" in text or "reverse possible" in text


def test_one_of_each_is_singular():
    text = str(linjac.plan_jacobian(lambda x: x**2)(array(0.5)))
    assert re.match(
        r"1 (forward|reverse) sweep in 1 chunk instead of 1 (forward|reverse) sweep: 1 input, 1 output; ", text
    )


def test_a_plan_runs_and_compiles_nothing():
    counted = Counted(tall)
    plan = linjac.plan_jacobian(counted.fun)
    with compiles(at_most=0):
        plan(X3)
        plan(X3)
    assert counted.calls == 1


def test_a_plan_under_jit_is_the_same():
    found = []
    jax.jit(lambda x: found.append(linjac.plan_jacobian(tall)(x)))(X3)
    assert found[0] == linjac.plan_jacobian(tall)(X3)


def test_frozen_hashable_and_equal():
    plans = [linjac.plan_jacobian(tall)(X3 * i) for i in (1, 2)]
    assert plans[0] == plans[1]
    assert hash(plans[0]) == hash(plans[1])
    for settings in ({"mode": "rev"}, {"chunk_size": 1}, {"layout": "matrix"}):
        assert linjac.plan_jacobian(tall, **settings)(X3) != plans[0]
    assert linjac.plan_jacobian(wide)(X64) != plans[0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        plans[0].mode = "rev"
    assert len({*plans}) == 1
    assert isinstance(plans[0], linjac.JacobianPlan)
    assert type(plans[0]).__module__ == "linjac"


def test_a_plan_holds_no_arrays():
    for value in vars(linjac.plan_jacobian(tall)(X3)).values():
        assert not isinstance(value, jax.Array | np.ndarray)
    assert "Array" not in repr(linjac.plan_jacobian(tall)(X3))


def test_bytes_of_the_result():
    assert linjac.plan_jacobian(tall)(X3).result_bytes == 64 * 3 * BYTES
    half = (array([1.0, 2.0], jnp.float16), array([1.0], jnp.float32))
    fun = lambda a, b: (a * 2, b * 2)
    assert linjac.plan_jacobian(fun, (0, 1))(*half).result_bytes == 4 * 2 + (2 + 2 + 1) * 4
    assert linjac.plan_jacobian(fun, (0, 1), layout="matrix")(*half).result_bytes == 9 * 4
    assert linjac.plan_jacobian(lambda x: x.astype(C))(X3).result_bytes == 9 * 2 * BYTES
    assert linjac.plan_jacobian(lambda x: x[:0])(X3).result_bytes == 0


@pytest.mark.parametrize("chunk_size", [1, 2, 7, 63, 64, 65, 10_000])
def test_chunks_cover_the_directions(chunk_size):
    plan = linjac.plan_jacobian(tall, mode="rev", chunk_size=chunk_size)(X3)
    assert plan.chunk_size <= chunk_size
    assert plan.chunks == -(-64 // min(chunk_size, 64))
    assert (plan.chunks - 1) * plan.chunk_size < 64 <= plan.chunks * plan.chunk_size


def test_chunks_from_the_memory_budget():
    points = array(real(4096, seed=60))
    fun = lambda x: jnp.sin(jnp.cumsum(x)) * x
    sizes = [linjac.plan_jacobian(fun, memory_budget=2**k)(points) for k in (18, 20, 22)]
    assert sizes[0].chunk_size < sizes[1].chunk_size < sizes[2].chunk_size
    for k, plan in zip((18, 20, 22), sizes, strict=True):
        assert plan.scratch_bytes <= 2 * 2**k
    assert linjac.plan_jacobian(fun, memory_budget=1)(points).chunk_size >= 1
    assert linjac.plan_jacobian(fun)(points).chunk_size >= 16
    small = linjac.plan_jacobian(tall, memory_budget=2**30)(X3)
    assert (small.chunks, small.chunk_size) == (1, 3)


# A plan as the mode ---------------------------------------------------------------------------------------------------


def test_a_plan_repeats_its_decision():
    plan = linjac.plan_jacobian(tall, mode="rev", chunk_size=5)(X3)
    again = linjac.plan_jacobian(tall, mode=plan)(2 * X3)
    assert (again.mode, again.chunks, again.chunk_size) == ("rev", 13, 5)
    assert again == plan
    close(linjac.jacobian(tall, mode=plan)(X3), jax.jacfwd(tall)(X3))
    close(linjac.value_and_jacobian(tall, mode=plan)(X3)[1], jax.jacfwd(tall)(X3))
    close(jax.jit(linjac.jacobian(tall, mode=plan))(X3), jax.jacfwd(tall)(X3))


def test_a_plan_serves_another_function_of_the_same_sizes():
    plan = linjac.plan_jacobian(square, mode="rev")(X3)
    close(linjac.jacobian(jnp.exp, mode=plan)(X3), np.diag(np.exp(NX3)))


@pytest.mark.parametrize("jit", [True, False])
def test_a_plan_for_other_sizes_is_refused(jit):
    plan = linjac.plan_jacobian(square)(X3)
    with pytest.raises(ValueError, match=r"linjac\.jacobian: the plan was made for 3 inputs and 3 outputs") as caught:
        linjac.jacobian(square, mode=plan, jit=jit)(X64)
    assert "64 inputs and 64 outputs" in str(caught.value)
    with pytest.raises(ValueError, match="the plan was made for"):
        linjac.jacobian(tall, mode=plan)(X3)


def test_a_plan_of_a_mode_that_cannot_work_here():
    plan = linjac.plan_jacobian(square, mode="rev")(X3)
    with pytest.raises(linjac.ModeError, match="mode='rev' cannot work here"):
        linjac.jacobian(loop_forward, mode=plan)(X3)


def test_a_plan_of_nothing_repeats_too():
    for fun, x in ((lambda x: x[:0] * 2.0, X3), (lambda x: jnp.sum(x) + X3, array(np.zeros(0)))):
        plan = linjac.plan_jacobian(fun)(x)
        assert (plan.result_bytes, plan.scratch_bytes) == (0, 0)
        assert linjac.jacobian(fun, mode=plan)(x).size == 0
        assert str(plan)


# Measured plans -------------------------------------------------------------------------------------------------------

measured = pytest.mark.skipif(not hasattr(linjac.Linearization, "jacobian"), reason="not built yet")


def _notes(plan, word):
    return [note for note in plan.notes if note.startswith(word)]


@measured
@pytest.mark.parametrize("layout", ["blocks", "matrix"])
def test_a_measurement_is_made_once(layout):
    counted = Counted(square)
    plan = linjac.plan_jacobian(counted.fun, mode="measure", layout=layout)
    first, other, wanted = plan(X3), X3 + 1, np.asarray(jax.jacfwd(square)(X3))
    assert first.mode in BOTH
    assert len(_notes(first, "measured:")) == 1
    assert "consider mode='measure'" not in str(first)
    with compiles(at_most=0):
        assert plan(other) == first
        got = linjac.jacobian(counted.fun, mode="measure", layout=layout)(X3)
    close(got, wanted)
    assert counted.calls == 1


@measured
def test_nothing_is_measured_where_one_mode_is_ruled_out():
    plan = linjac.plan_jacobian(loop_forward, mode="measure")(X3)
    assert plan.mode == "fwd"
    assert len(_notes(plan, "not measured:")) == 1
    close(linjac.jacobian(loop_forward, mode="measure")(X3), jax.jacfwd(loop_forward)(X3))


@measured
def test_under_tracing_the_cached_answer_counts_or_the_size_rule():
    counted = Counted(square)
    found = []

    def traced(x):
        found.append(linjac.plan_jacobian(counted.fun, mode="measure")(x))
        return linjac.jacobian(counted.fun, mode="measure")(x)

    close(jax.jit(traced)(X3), jax.jacfwd(square)(X3))
    assert len(_notes(found[-1], "not measured:")) == 1
    assert "size rule" in str(found[-1])
    assert found[-1].mode == linjac.plan_jacobian(square)(X3).mode
    here = linjac.plan_jacobian(counted.fun, mode="measure")(X3)
    close(jax.vmap(traced)(jnp.stack([X3, X3]))[1], jax.jacfwd(square)(X3))
    assert found[-1].mode == here.mode
    assert _notes(found[-1], "measured:") == _notes(here, "measured:")


@measured
def test_a_measured_plan_repeats_its_decision():
    plan = linjac.plan_jacobian(tall, mode="measure")(X3)
    again = linjac.plan_jacobian(tall, mode=plan)(2 * X3)
    assert (again.mode, again.chunk_size) == (plan.mode, plan.chunk_size)
    close(jax.jit(linjac.jacobian(tall, mode=plan))(X3), jax.jacfwd(tall)(X3))


@measured
def test_measuring_nothing():
    plan = linjac.plan_jacobian(lambda x: x[:0] * 2.0, mode="measure")(X3)
    assert plan.result_bytes == 0
    assert linjac.jacobian(lambda x: x[:0] * 2.0, mode="measure")(X3).shape == (0, 3)


# Rows, columns and the matrix -----------------------------------------------------------------------------------------


def tree_function(tree, y):
    pair = Pair(tree["a"] * y[0], [jnp.sum(tree["a"]) * y, None])
    return {"out": pair, "scalar": tree["b"][0] ** 2}


ARGS = ({"a": X3[:2], "b": (array(0.5), None)}, array(real(1, 2, seed=61)).reshape(2))


@pytest.mark.parametrize("mode", BOTH)
def test_names_of_rows_and_columns(mode):
    plan = linjac.plan_jacobian(tree_function, (0, 1), mode=mode)(*ARGS)
    assert plan.rows == (
        "output['out'].left[0]",
        "output['out'].left[1]",
        "output['out'].right[0][0]",
        "output['out'].right[0][1]",
        "output['scalar']",
    )
    assert plan.columns == ("args[0]['a'][0]", "args[0]['a'][1]", "args[0]['b'][0]", "args[1][0]", "args[1][1]")
    plan = linjac.plan_jacobian(lambda y, x: x.reshape(2, 2), -1, mode=mode)(0.5, jnp.zeros((4, 1), F))
    assert plan.rows == ("output[0, 0]", "output[0, 1]", "output[1, 0]", "output[1, 1]")
    assert plan.columns == ("args[1][0, 0]", "args[1][1, 0]", "args[1][2, 0]", "args[1][3, 0]")


@pytest.mark.parametrize("argnums", [0, 1, (0,), (1, 0), (0, 1)], ids=repr)
@pytest.mark.parametrize("mode", BOTH)
def test_unflatten_is_the_inverse_of_the_matrix(argnums, mode):
    settings = {"argnums": argnums, "mode": mode}
    blocks = linjac.jacobian(tree_function, **settings)(*ARGS)
    matrix = linjac.jacobian(tree_function, layout="matrix", **settings)(*ARGS)
    plan = linjac.plan_jacobian(tree_function, layout="matrix", **settings)(*ARGS)
    assert matrix.shape == (len(plan.rows), len(plan.columns)) == (plan.m, plan.n)
    got = plan.unflatten(matrix)
    assert jax.tree.structure(got) == jax.tree.structure(blocks)
    jax.tree.map(close, got, blocks)
    chosen = ARGS[argnums] if isinstance(argnums, int) else tuple(ARGS[i] for i in argnums)
    close(matrix, matrix_of(blocks, tree_function(*ARGS), chosen))
    close(jax.tree.leaves(jax.jit(plan.unflatten)(matrix))[0], jax.tree.leaves(blocks)[0])


def test_a_label_belongs_to_its_entry():
    """Entry (i, k) of the matrix is the derivative of what row i names with respect to what column k names."""
    plan = linjac.plan_jacobian(tree_function, (0, 1), layout="matrix")(*ARGS)
    matrix = linjac.jacobian(tree_function, (0, 1), layout="matrix")(*ARGS)
    i = plan.rows.index("output['out'].right[0][1]")
    close(matrix[i, plan.columns.index("args[1][1]")], jnp.sum(ARGS[0]["a"]))
    close(matrix[i, plan.columns.index("args[1][0]")], 0.0)
    close(matrix[plan.rows.index("output['scalar']"), plan.columns.index("args[0]['b'][0]")], 1.0)


@pytest.mark.parametrize("shape", [(5, 4), (25,), (4, 5), (1, 5, 5)])
def test_unflatten_refuses_other_shapes(shape):
    plan = linjac.plan_jacobian(tree_function, (0, 1))(*ARGS)
    with pytest.raises(ValueError, match=r"linjac\.JacobianPlan\.unflatten.*\(5, 5\)"):
        plan.unflatten(jnp.zeros(shape))


# Memory ---------------------------------------------------------------------------------------------------------------


def _peak_kilobytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize("settings", [{}, {"mode": "fwd"}, {"mode": "rev"}, {"layout": "matrix"}, {"chunk_size": 4}])
def test_a_result_that_cannot_fit_is_refused_before_anything_is_allocated(settings):
    x = jnp.zeros(10**7, jnp.float32)
    arrays, peak = len(jax.live_arrays()), _peak_kilobytes()
    with compiles(at_most=0), pytest.raises(linjac.MemoryBudgetError) as caught:
        linjac.jacobian(linear, **settings)(x)
    assert len(jax.live_arrays()) <= arrays
    assert _peak_kilobytes() - peak < 20_000
    text = str(caught.value)
    assert text.startswith("linjac.jacobian: the Jacobian is 10000000 x 10000000, 400,000,000,000,000 bytes")
    assert "linearize_many" in text


def linear(x):
    return 2.0 * x


def test_a_result_that_cannot_fit_is_refused_everywhere():
    x = jnp.zeros(10**7, jnp.float32)
    with pytest.raises(linjac.MemoryBudgetError):
        jax.jit(linjac.jacobian(linear))(x)
    with pytest.raises(linjac.MemoryBudgetError):
        linjac.value_and_jacobian(linear, jit=False)(x)
    with pytest.raises(linjac.MemoryBudgetError):
        jax.grad(lambda y: jnp.sum(linjac.jacobian(linear)(y)))(x)


BASELINES, CHANNELS = array(real(3, 128, seed=62), jnp.float32), array(np.linspace(0.8, 1.7, 16), jnp.float32)


def visibilities(places):
    """Phases of ten sources on 128 baselines and 16 channels: 20 -> 20,480."""
    left, up = places[:, 0, None, None], places[:, 1, None, None]
    depth = jnp.sqrt(1.0 - left**2 - up**2) - 1.0
    u, v, w = BASELINES[:, None, :, None]
    return (u * left + v * up + w * depth) * CHANNELS[None, None, :]


@pytest.mark.parametrize("chunk_size", [None, 64])
def test_scratch_of_a_tall_reverse_jacobian(chunk_size):
    x = array(real(10, 2, seed=63, low=-0.1, high=0.1), jnp.float32)
    plan = linjac.plan_jacobian(visibilities, mode="rev", chunk_size=chunk_size)(x)
    assert (plan.m, plan.n, plan.mode) == (20_480, 20, "rev")
    assert plan.chunks > 1
    with compiles(at_most=1):
        scratch = plan.compile()
    assert 0 < scratch <= 24e6
    assert plan.scratch_bytes <= 24e6
    assert linjac.plan_jacobian(visibilities)(x).mode == "fwd"


CASES = [
    ("rev", lambda x: jnp.sin(TALL @ x), X3),
    ("fwd", lambda x: jnp.sin(WIDE @ x), X64),
    ("fwd", lambda x: jnp.sum(jnp.sin(x).reshape(16, 4), 0) ** 2, X64),
    ("rev", lambda x: jnp.sin(x[:, None] * TALL.T).ravel(), X3),
]


@pytest.mark.parametrize(("mode", "fun", "x"), CASES)
def test_seeds_are_never_a_whole_basis(mode, fun, x):
    """No value, constant or intermediate, comes near the size that the basis would have."""
    plan = linjac.plan_jacobian(fun, mode=mode, chunk_size=4)(x)
    basis = (plan.n if mode == "fwd" else plan.m) ** 2
    assert basis > 8 * plan.m * plan.n
    jaxpr = jax.make_jaxpr(linjac.jacobian(fun, mode=mode, chunk_size=4))(x)
    assert largest(jaxpr) < basis // 8
    close(linjac.jacobian(fun, mode=mode, chunk_size=4)(x), jax.jacfwd(fun)(x))


@pytest.mark.parametrize("mode", BOTH)
def test_no_constant_in_the_compiled_program(mode):
    x = array(real(256, seed=64))
    text = jax.jit(linjac.jacobian(square, mode=mode, chunk_size=16)).lower(x).as_text()
    assert max(map(len, text.splitlines())) < 1000


@pytest.mark.parametrize("mode", BOTH)
def test_scratch_does_not_grow_with_the_number_of_directions(mode):
    sizes = []
    for n in (256, 1024):
        plan = linjac.plan_jacobian(square, mode=mode, chunk_size=16)(array(real(n, seed=65)))
        sizes.append(plan.compile() / n)
    assert sizes[1] <= 2 * sizes[0] + 64  # per entry of a direction, the chunk being the same


# No barrier or seed stands in the way of differentiation -------------------------------------------------------------

SHAPES = {
    "tall_matmul": (lambda x: TALL @ jnp.sin(x), X3),
    "tall_activation": (tall, X3),
    "wide": (wide, X64),
    "elementwise": (square, X3),
    "stencil": (lambda x: jnp.roll(x, 1) * x - jnp.roll(x, -1) ** 2, X64[:6]),
    "scan": (lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c) * x, c), x, None, length=3)[1], X3),
    "two_layers": (lambda x: jnp.tanh(TALL.T @ jnp.tanh(TALL @ x)), X3),
}


@pytest.mark.parametrize("mode", ["auto", "fwd", "rev"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_plan_can_be_differentiated(name, mode):
    fun, x = SHAPES[name]
    jac = linjac.jacobian(fun, mode=mode)
    want = jax.jit(jax.grad(lambda x: jnp.sum(jax.jacfwd(fun)(x) ** 2)))(x)
    close(jax.jit(jax.grad(lambda x: jnp.sum(jac(x) ** 2)))(x), want)
    tangent = jax.jit(lambda x: jax.jvp(jac, (x,), (x,))[1])(x)
    close(jnp.sum(tangent * jac(x)) * 2, jnp.vdot(want, x))
