"""A Linearization as an operator: its own face, and in the hands of lineax, scipy, jax.scipy and matfree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse.linalg
from jax.scipy.sparse.linalg import cg, gmres

import linjac
from scenarios import BY_NAME, FULL, SCENARIOS, TOLERANCE, F, array, ravel, real

LOOSE = 1e-6 if FULL else 2e-3
A = real(4, 4, seed=81) * 0.2
SPD = array(A @ A.T + np.eye(4))
GENERAL = array(A + 2 * np.eye(4))
X = array(real(4, seed=82))
B = array(real(4, seed=83))
TALL = array(real(7, 3, seed=84))


def potential_gradient(x):
    """Its Jacobian is symmetric and positive definite."""
    return SPD @ x + 0.1 * x**3


def general(x):
    return jnp.tanh(GENERAL @ x)


def tall(x):
    return jnp.sin(TALL @ x)


def matrix(fun, x):
    return np.asarray(jax.jacfwd(fun)(x))


def linear(name):
    """The operator of a scenario and its closed form."""
    s = BY_NAME[name]
    return linjac.linearize_many(s.fun, *s.primals, **s.options)[1], s.matrices()[0]


MIXED = {"real_to_complex", "complex_to_real", "not_holomorphic", "mixed_floats"}
UNIFORM = [s.name for s in SCENARIOS if s.reverse and s.name not in MIXED]


def close(got, want, tolerance=TOLERANCE):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


# The face -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", UNIFORM)
def test_as_matrix_is_outputs_by_inputs(name):
    op, want = linear(name)
    assert op.shape == want.shape
    got = op.as_matrix()
    assert got.shape == want.shape
    assert got.dtype == op.dtype
    close(got, want)


@pytest.mark.parametrize(
    "name", ["dense_tall", "nested_tree", "integer_leaves", "two_arguments", "holomorphic", "scalar"]
)
def test_flat_products(name):
    op, want = linear(name)
    rng, (m, n) = np.random.default_rng(0), want.shape
    v, c = (array(rng.normal(size=s) * (1 + 1j if np.iscomplexobj(want) else 1)) for s in ((n, 3), (m, 3)))
    close(op.matvec(v[:, 0]), want @ v[:, 0])
    close(op.rmatvec(c[:, 0]), want.conj().T @ c[:, 0])
    close(op.matmat(v), want @ v)
    close(op.rmatmat(c), want.conj().T @ c)


def test_complex_rmatvec_is_the_conjugate_transpose_and_transpose_is_not():
    op, want = linear("holomorphic")
    c = array([1.0 + 2.0j, -0.5j])
    close(op.rmatvec(c), want.conj().T @ c)
    close(op.transpose(c)[0], want.T @ c)


def test_structures():
    _, op = linjac.linearize_many(tall, X[:3])
    assert jax.tree.map(lambda s: (s.shape, s.dtype), op.in_structure()) == ((3,), F)
    assert (op.in_structure().shape, op.out_structure().shape) == ((3,), (7,))
    assert op.out_structure().dtype == F
    close(op.mv(X[:3]), matrix(tall, X[:3]) @ X[:3])


def test_mv_takes_one_argument_shaped_like_in_structure():
    s = BY_NAME["two_arguments"]
    op, want = linear("two_arguments")
    tangents = s.tangents()
    assert jax.tree.structure(op.in_structure()) == jax.tree.structure(tangents)
    close(ravel(op.mv(tangents)), want @ ravel(tangents))


def test_in_structure_sees_only_argnums():
    op, want = linear("argnums_pair")
    assert [leaf.shape for leaf in jax.tree.leaves(op.in_structure())] == [(3, 2), (2,)]
    assert op.shape == want.shape == (4, 8)


def test_repr_is_one_line_with_shapes_and_no_contents():
    _, op = linjac.linearize_many(tall, array([123.456789, 2.0, 3.0]))
    text = repr(op)
    assert "\n" not in text
    assert "7" in text
    assert "3" in text
    assert "123.45" not in text


def test_the_face_works_under_jit():
    _, op = linjac.linearize_many(tall, X[:3])
    got = jax.jit(lambda o, v: (o.matvec(v), o.rmatvec(o.matvec(v)), o.as_matrix()))(op, X[:3])
    want = matrix(tall, X[:3])
    for g, w in zip(got, (want @ X[:3], want.T @ (want @ X[:3]), want), strict=True):
        close(g, w)


def test_flat_products_refuse_another_length():
    _, op = linjac.linearize_many(tall, X[:3])
    for product, length in ((op.matvec, 7), (op.rmatvec, 3)):
        with pytest.raises((TypeError, ValueError)):
            product(jnp.ones(length, F))


# In other hands -------------------------------------------------------------------------------------------------------


def test_lineax_cg():
    lx = pytest.importorskip("lineax")
    _, linear_fn = linjac.linearize_many(potential_gradient, X)
    tags = (lx.symmetric_tag, lx.positive_semidefinite_tag)
    operator = lx.FunctionLinearOperator(linear_fn, linear_fn.in_structure(), tags)
    solution = lx.linear_solve(operator, B, lx.CG(rtol=1e-8, atol=1e-8)).value
    close(matrix(potential_gradient, X) @ solution, B, LOOSE)


def test_lineax_gmres():
    lx = pytest.importorskip("lineax")
    _, linear_fn = linjac.linearize_many(general, X)
    operator = lx.FunctionLinearOperator(linear_fn, linear_fn.in_structure())
    solution = lx.linear_solve(operator, B, lx.GMRES(rtol=1e-7, atol=1e-7)).value
    close(matrix(general, X) @ solution, B, LOOSE)
    close(operator.as_matrix(), matrix(general, X))
    close(operator.T.mv(B), matrix(general, X).T @ B)


def test_lineax_with_trees():
    lx = pytest.importorskip("lineax")
    s = BY_NAME["nested_tree"]
    op, want = linear("nested_tree")
    operator = lx.FunctionLinearOperator(op, op.in_structure())
    (tangent,) = s.tangents()
    close(ravel(operator.mv(tangent)), want @ ravel(tangent))


@pytest.mark.skipif(not FULL, reason="lsmr overflows in single precision")
def test_scipy_svds_and_lsmr():
    _, op = linjac.linearize_many(tall, X[:3])
    wrapped = scipy.sparse.linalg.aslinearoperator(op)
    want = matrix(tall, X[:3])
    assert wrapped.shape == want.shape
    start = np.ones(3, np.asarray(B).dtype)
    largest = scipy.sparse.linalg.svds(wrapped, k=2, return_singular_vectors=False, v0=start)
    right = np.linalg.svd(want, compute_uv=False)[:2]
    close(np.sort(largest)[::-1], right, LOOSE)
    b = real(7, seed=85).astype(np.asarray(B).dtype)
    solution = scipy.sparse.linalg.lsmr(wrapped, b, atol=1e-12, btol=1e-12)[0]
    close(solution, np.linalg.lstsq(want, b, rcond=None)[0], LOOSE)


def test_jax_scipy_cg_and_gmres():
    _, op = linjac.linearize_many(potential_gradient, X)
    solution, _ = cg(op, B, tol=1e-10)
    close(matrix(potential_gradient, X) @ solution, B, LOOSE)
    _, op = linjac.linearize_many(general, X)
    solution, _ = jax.jit(lambda f, b: gmres(f, b, tol=1e-10))(op, B)
    close(matrix(general, X) @ solution, B, LOOSE)


def test_matfree_trace_estimate():
    stochtrace = pytest.importorskip("matfree.stochtrace")
    _, op = linjac.linearize_many(general, X)
    sampler = stochtrace.sampler_signs(B, num=2_000)
    estimate = stochtrace.estimator_monte_carlo(stochtrace.monte_carlo_trace(), sampler=sampler)
    assert abs(float(estimate(op, jax.random.key(0))) - np.trace(matrix(general, X))) < 0.1
