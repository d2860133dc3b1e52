"""What a kept program is guarded by: a change of anything that the function sees is seen, and nothing else retraces.

Each case is a generator: it yields a function that computes FACTOR x², FACTOR being 2; then changes something; then
yields the function that is to compute 5 x². Each has its own code location, for linjac counts traces by location.
"""

import functools
import gc
import sys
import types
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import linjac
from scenarios import F, array, real

# Every test makes functions of its own: wrappers of JAX, decorators and methods share one code location among tests.
pytestmark = pytest.mark.filterwarnings("ignore::linjac.PerformanceWarning")

FACTOR = 2.0
X = array(real(3, seed=90, low=0.5))
V = array(real(3, seed=91))
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def close(have, want):
    np.testing.assert_allclose(have, want, rtol=2e-5)


def computes(fun, factor):
    """`linearize_many` at X gives factor x², and its product."""
    value, linear_fn = linjac.linearize_many(fun, X)
    close(value, factor * X**2)
    close(linear_fn(V), 2 * factor * X * V)


def rebind(patch, value=5.0):
    patch.setitem(globals(), "FACTOR", value)


# What code names ------------------------------------------------------------------------------------------------------


@case
def a_global(patch):
    def fun(x):
        return FACTOR * x**2

    yield fun
    rebind(patch)
    yield fun


@case
def a_global_array(patch):
    def fun(x):
        return FACTOR * x**2

    rebind(patch, jnp.full(3, 2.0, F))
    yield fun
    rebind(patch, jnp.full(3, 5.0, F))
    yield fun


@case
def a_global_in_a_nested_function(patch):
    def fun(x):
        def inner(y):
            return sum(FACTOR * z for z in (y**2,))

        return inner(x)

    yield fun
    rebind(patch)
    yield fun


@case
def a_closure_cell(patch):
    factor = 2.0

    def fun(x):
        return factor * x**2

    yield fun
    factor = 5.0
    yield fun


@case
def a_default(patch):
    def fun(x, factor=2.0):
        return factor * x**2

    yield fun
    fun.__defaults__ = (5.0,)
    yield fun


@case
def a_keyword_default(patch):
    def fun(x, *, factor=2.0):
        return factor * x**2

    yield fun
    fun.__kwdefaults__["factor"] = 5.0
    yield fun


@case
def replaced_keyword_defaults(patch):
    def fun(x, *, factor=2.0):
        return factor * x**2

    yield fun
    fun.__kwdefaults__ = {"factor": 5.0}
    yield fun


@case
def a_default_function(patch):
    def fun(x, scaled=lambda y: FACTOR * y):
        return scaled(x**2)

    yield fun
    rebind(patch)
    yield fun


@case
def a_keyword_default_function(patch):
    def fun(x, *, scaled=lambda y: FACTOR * y):
        return scaled(x**2)

    yield fun
    rebind(patch)
    yield fun


@case
def replaced_code(patch):
    def fun(x):
        return 2.0 * x**2

    def other(x):
        return 5.0 * x**2

    yield fun
    fun.__code__ = other.__code__
    yield fun


def scaled_by_factor(y):
    return FACTOR * y


def scaled_twice_over(y):
    return scaled_by_factor(y)


@case
def a_helper_that_reads_a_global(patch):
    def fun(x):
        return scaled_by_factor(x**2)

    yield fun
    rebind(patch)
    yield fun


@case
def a_helper_of_a_helper(patch):
    def fun(x):
        return scaled_twice_over(x**2)

    yield fun
    rebind(patch)
    yield fun


@case
def a_helper_in_a_closure(patch):
    scaled = lambda y: FACTOR * y

    def fun(x):
        return scaled(x**2)

    yield fun
    rebind(patch)
    yield fun


@case
def a_rebound_helper(patch):
    def fun(x):
        return scaled_by_factor(x**2)

    yield fun
    patch.setitem(globals(), "scaled_by_factor", lambda y: 5.0 * y)
    yield fun


@case
def a_builtin_that_a_global_hides(patch):
    def fun(x):
        return 2.0 * abs(x) ** 2

    yield fun
    patch.setitem(globals(), "abs", lambda y: jnp.sqrt(2.5) * y)
    yield fun


module = types.ModuleType("module")
module.inner = types.ModuleType("module.inner")


@case
def an_attribute_of_a_module(patch):
    def fun(x):
        return module.factor * x**2

    patch.setattr(module, "factor", 2.0, raising=False)
    yield fun
    module.factor = 5.0
    yield fun


@case
def an_attribute_of_a_submodule(patch):
    def fun(x):
        return module.inner.factor * x**2

    patch.setattr(module.inner, "factor", 2.0, raising=False)
    yield fun
    module.inner.factor = 5.0
    yield fun


# Containers -----------------------------------------------------------------------------------------------------------

WEIGHTS = {"layers": [{"factor": 2.0}]}
FUNCTIONS = {"scaled": lambda y: FACTOR * y}


@case
def a_global_dict_of_weights(patch):
    def fun(x):
        return WEIGHTS["layers"][0]["factor"] * x**2

    yield fun
    patch.setitem(WEIGHTS["layers"][0], "factor", 5.0)
    yield fun


@case
def a_closed_over_dict_of_weights(patch):
    weights = {"layers": [{"factor": jnp.full(3, 2.0, F)}]}

    def fun(x):
        return weights["layers"][0]["factor"] * x**2

    yield fun
    weights["layers"][0]["factor"] = jnp.full(3, 5.0, F)
    yield fun


@case
def a_dict_as_default(patch):
    def fun(x, weights={"factor": 2.0}):  # noqa: B006
        return weights["factor"] * x**2

    yield fun
    fun.__defaults__[0]["factor"] = 5.0
    yield fun


@case
def a_dict_as_attribute(patch):
    class Model:
        def __init__(self):
            self.weights = {"factor": 2.0}

        def apply(self, x):
            return self.weights["factor"] * x**2

    model = Model()
    yield model.apply
    model.weights["factor"] = 5.0
    yield model.apply


@case
def a_value_that_moves_to_another_key(patch):
    weights = {"a": 5.0, "b": None}

    def fun(x):
        return (2.0 if weights["b"] is None else weights["b"]) * x**2

    yield fun
    weights.update(a=None, b=weights["a"])
    yield fun


@case
def a_dict_that_holds_itself(patch):
    weights = {"factor": 2.0}
    weights["self"] = weights

    def fun(x):
        return weights["self"]["factor"] * x**2

    yield fun
    weights["factor"] = 5.0
    yield fun


@case
def a_dict_with_keys_that_have_no_order(patch):
    weights = {"factor": 2.0, 1: 3.0, None: 4.0}

    def fun(x):
        return weights["factor"] * x**2

    yield fun
    weights["factor"] = 5.0
    yield fun


@case
def functions_in_a_global_dict(patch):
    def fun(x):
        return FUNCTIONS["scaled"](x**2)

    yield fun
    rebind(patch)
    yield fun


@case
def a_replaced_function_in_a_global_dict(patch):
    def fun(x):
        return FUNCTIONS["scaled"](x**2)

    yield fun
    patch.setitem(FUNCTIONS, "scaled", lambda y: 5.0 * y)
    yield fun


# Objects --------------------------------------------------------------------------------------------------------------


class Base:
    """Read through instances of `Child`."""

    factor = 2.0

    def inherited(self, y):
        return FACTOR * y

    @property
    def current(self):
        return FACTOR

    @staticmethod
    def static(y):
        return FACTOR * y

    @classmethod
    def of_class(cls, x):
        return cls.factor * x**2


class Child(Base):
    def by_class_attribute(self, x):
        return self.factor * x**2

    def by_inherited_method(self, x):
        return self.inherited(x**2)

    def by_property(self, x):
        return self.current * x**2

    def by_staticmethod(self, x):
        return self.static(x**2)

    def by_classmethod(self, x):
        return self.of_class(x)

    def by_override(self, x):
        return self.inherited(x**2)

    def monkeypatched(self, x):
        return 2.0 * x**2


@case
def an_attribute_of_self(patch):
    class Model:
        def __init__(self):
            self.factor = 2.0

        def apply(self, x):
            return self.factor * x**2

    model = Model()
    yield model.apply
    model.factor = 5.0
    yield model.apply


@case
def a_new_attribute_that_hides_one_of_the_class(patch):
    child = Child()
    yield child.by_class_attribute
    child.factor = 5.0
    yield child.by_class_attribute


@case
def a_class_attribute(patch):
    child = Child()
    yield child.by_class_attribute
    patch.setattr(Base, "factor", 5.0)
    yield child.by_class_attribute


@case
def a_class_attribute_of_the_subclass(patch):
    class Grandchild(Child):
        factor = 2.0

        def apply(self, x):
            return self.factor * x**2

    child = Grandchild()
    yield child.apply
    Grandchild.factor = 5.0
    yield child.apply


@case
def an_attribute_read_by_a_classmethod(patch):
    yield Base.of_class
    patch.setattr(Base, "factor", 5.0)
    yield Base.of_class


@case
def an_attribute_read_by_a_classmethod_that_a_method_calls(patch):
    child = Child()
    yield child.by_classmethod
    patch.setattr(Base, "factor", 5.0)
    yield child.by_classmethod


@case
def an_inherited_method(patch):
    child = Child()
    yield child.by_inherited_method
    rebind(patch)
    yield child.by_inherited_method


@case
def an_override_set_on_the_subclass(patch):
    child = Child()
    yield child.by_override
    patch.setattr(Child, "inherited", lambda self, y: 5.0 * y, raising=False)
    yield child.by_override


@case
def a_property(patch):
    child = Child()
    yield child.by_property
    rebind(patch)
    yield child.by_property


@case
def a_staticmethod(patch):
    child = Child()
    yield child.by_staticmethod
    rebind(patch)
    yield child.by_staticmethod


@case
def a_staticmethod_as_the_function(patch):
    yield lambda x: Base.static(x**2)
    rebind(patch)
    yield lambda x: Base.static(x**2)


@case
def a_monkeypatched_method(patch):
    child = Child()
    yield child.monkeypatched
    patch.setattr(Child, "monkeypatched", lambda self, x: 5.0 * x**2)
    yield child.monkeypatched


@case
def a_monkeypatched_helper_method(patch):
    child = Child()
    yield child.by_inherited_method
    patch.setattr(Base, "inherited", lambda self, y: 5.0 * y)
    yield child.by_inherited_method


@case
def slots(patch):
    class Model:
        __slots__ = ("__weakref__", "factor")

        def __init__(self):
            self.factor = 2.0

        def apply(self, x):
            return self.factor * x**2

    model = Model()
    yield model.apply
    model.factor = 5.0
    yield model.apply


@case
def slots_without_a_weak_reference(patch):
    class Model:
        __slots__ = "factor"

        def __init__(self):
            self.factor = 2.0

        def apply(self, x):
            return self.factor * x**2

    model = Model()
    yield model.apply
    model.factor = 5.0
    yield model.apply


@case
def inherited_slots(patch):
    class Slotted:
        __slots__ = ("__weakref__", "factor")

    class Model(Slotted):
        __slots__ = ("other",)

        def apply(self, x):
            return self.factor * x**2

    model = Model()
    model.factor = 2.0
    yield model.apply
    model.factor = 5.0
    yield model.apply


@case
def a_callable_object(patch):
    class Model:
        def __init__(self):
            self.factor = 2.0

        def __call__(self, x):
            return self.factor * x**2

    model = Model()
    yield model
    model.factor = 5.0
    yield model


@case
def a_callable_object_that_reads_a_global(patch):
    class Model:
        def __call__(self, x):
            return FACTOR * x**2

    model = Model()
    yield model
    rebind(patch)
    yield model


@case
def a_callable_object_with_an_inherited_call(patch):
    class Model:
        def __call__(self, x):
            return FACTOR * x**2

    class Derived(Model):
        pass

    model = Derived()
    yield model
    rebind(patch)
    yield model


@case
def a_callable_object_that_holds_a_function(patch):
    class Model:
        def __init__(self, scaled):
            self.scaled = scaled

        def __call__(self, x):
            return self.scaled(x**2)

    model = Model(lambda y: FACTOR * y)
    yield model
    rebind(patch)
    yield model


class Factory:
    """Made anew inside the function."""

    def apply(self, y):
        return FACTOR * y


@case
def a_method_of_a_global_class(patch):
    def fun(x):
        return Factory().apply(x**2)

    yield fun
    rebind(patch)
    yield fun


@case
def a_monkeypatched_method_of_a_global_class(patch):
    def fun(x):
        return Factory().apply(x**2)

    yield fun
    patch.setattr(Factory, "apply", lambda self, y: 5.0 * y)
    yield fun


# Wrappers and partials ------------------------------------------------------------------------------------------------


@case
def vmap(patch):
    fun = jax.vmap(lambda x: FACTOR * x**2)
    yield fun
    rebind(patch)
    yield fun


@case
def grad(patch):
    fun = jax.grad(lambda x: jnp.sum(FACTOR * x**3) / 3)
    yield fun
    rebind(patch)
    yield fun


@case
def value_and_grad(patch):
    of = jax.value_and_grad(lambda x: jnp.sum(FACTOR * x**3) / 3)
    fun = lambda x: of(x)[1]
    yield fun
    rebind(patch)
    yield fun


@case
def hessian(patch):
    of = jax.hessian(lambda x: jnp.sum(FACTOR * x**3) / 6)
    fun = lambda x: of(x) @ x
    yield fun
    rebind(patch)
    yield fun


@case
def checkpoint_of_what_is_made_in_the_function(patch):
    def fun(x):
        return jax.checkpoint(lambda y: FACTOR * y**2)(x)

    yield fun
    rebind(patch)
    yield fun


@case
def two_wrappers(patch):
    fun = jax.vmap(jax.grad(jax.grad(lambda x: FACTOR * x**4 / 12)))
    yield fun
    rebind(patch)
    yield fun


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


@case
def a_decorator(patch):
    fun = decorated(lambda x: FACTOR * x**2)
    yield fun
    rebind(patch)
    yield fun


scaled_partially = functools.partial(lambda a, y: FACTOR * a * y, 1.0)


@case
def a_global_partial(patch):
    def fun(x):
        return scaled_partially(x**2)

    yield fun
    rebind(patch)
    yield fun


@case
def a_closed_over_partial(patch):
    scaled = functools.partial(lambda a, y: FACTOR * a * y, 1.0)

    def fun(x):
        return scaled(x**2)

    yield fun
    rebind(patch)
    yield fun


@case
def a_partial(patch):
    fun = functools.partial(lambda a, x: FACTOR * a * x**2, jnp.ones((), F))
    yield fun
    rebind(patch)
    yield fun


@case
def a_static_function(patch):
    fun = functools.partial(lambda scaled, x: scaled(x**2), lambda y: FACTOR * y)
    yield fun
    rebind(patch)
    yield fun


@case
def a_static_bound_method(patch):
    class Model:
        def __init__(self):
            self.factor = 2.0

        def scaled(self, y):
            return self.factor * y

    model = Model()
    apply = lambda scaled, x: scaled(x**2)
    yield functools.partial(apply, model.scaled)
    model.factor = 5.0
    yield functools.partial(apply, model.scaled)


@case
def eqx_filter_vmap(patch):
    fun = eqx.filter_vmap(lambda x: FACTOR * x**2)
    yield fun
    rebind(patch)
    yield fun


# Rules ----------------------------------------------------------------------------------------------------------------


@case
def custom_jvp(patch):
    @jax.custom_jvp
    def fun(x):
        return FACTOR * x**2

    fun.defjvp(lambda primals, tangents: (FACTOR * primals[0] ** 2, 2 * FACTOR * primals[0] * tangents[0]))
    yield fun
    rebind(patch)
    yield fun


@case
def a_closed_over_custom_jvp(patch):
    @jax.custom_jvp
    def square(x):
        return FACTOR * x**2

    square.defjvp(lambda primals, tangents: (FACTOR * primals[0] ** 2, 2 * FACTOR * primals[0] * tangents[0]))
    fun = lambda x: square(x)
    yield fun
    rebind(patch)
    yield fun


@case
def custom_vjp(patch):
    @jax.custom_vjp
    def fun(x):
        return FACTOR * x**2

    fun.defvjp(lambda x: (FACTOR * x**2, x), lambda x, c: (2 * FACTOR * x * c,))
    yield fun
    rebind(patch)
    yield fun


@case
def a_closed_over_custom_vjp(patch):
    @jax.custom_vjp
    def square(x):
        return FACTOR * x**2

    square.defvjp(lambda x: (FACTOR * x**2, x), lambda x, c: (2 * FACTOR * x * c,))
    fun = lambda x: square(x)
    yield fun
    rebind(patch)
    yield fun


# Equinox --------------------------------------------------------------------------------------------------------------


class Module(eqx.Module):
    """Its array is an argument; the global is not."""

    weight: jax.Array

    def __call__(self, x):
        return FACTOR * self.weight * x**2

    def helped(self, x):
        return self.apply(x)

    def apply(self, x):
        return FACTOR * self.weight * x**2


@case
def an_equinox_module(patch):
    model = Module(jnp.ones(3, F))
    yield model
    rebind(patch)
    yield model


@case
def a_bound_method_of_an_equinox_module(patch):
    model = Module(jnp.ones(3, F))
    yield model.apply
    rebind(patch)
    yield model.apply


@case
def a_bound_method_that_calls_another_of_an_equinox_module(patch):
    model = Module(jnp.ones(3, F))
    yield model.helped
    rebind(patch)
    yield model.helped


@case
def another_array_in_an_equinox_module(patch):
    yield Module(jnp.full(3, 1.0, F))
    yield Module(jnp.full(3, 2.5, F))


@case
def a_monkeypatched_method_of_an_equinox_module(patch):
    class Patched(eqx.Module):
        weight: jax.Array

        def apply(self, x):
            return 2.0 * self.weight * x**2

        def __call__(self, x):
            return self.apply(x)

    model = Patched(jnp.ones(3, F))
    yield model
    Patched.apply = lambda self, x: 5.0 * self.weight * x**2
    yield model


# Helpers of functions that are no plain functions ---------------------------------------------------------------------


@case
def vmap_of_what_calls_a_helper(patch):
    fun = jax.vmap(lambda x: scaled_by_factor(x**2))
    yield fun
    rebind(patch)
    yield fun


@case
def grad_of_what_calls_a_helper(patch):
    fun = jax.grad(lambda x: jnp.sum(scaled_by_factor(x**3)) / 3)
    yield fun
    rebind(patch)
    yield fun


@case
def custom_jvp_that_calls_a_helper(patch):
    @jax.custom_jvp
    def fun(x):
        return scaled_by_factor(x**2)

    def rule(primals, tangents):
        (x,), (t,) = primals, tangents
        return scaled_by_factor(x**2), scaled_by_factor(2 * x * t)

    fun.defjvp(rule)
    yield fun
    rebind(patch)
    yield fun


@case
def custom_vjp_that_calls_a_helper(patch):
    @jax.custom_vjp
    def fun(x):
        return scaled_by_factor(x**2)

    fun.defvjp(lambda x: (scaled_by_factor(x**2), x), lambda x, c: (scaled_by_factor(2 * x * c),))
    yield fun
    rebind(patch)
    yield fun


@case
def a_callable_object_that_calls_a_helper(patch):
    class Model:
        def __call__(self, x):
            return scaled_by_factor(x**2)

    model = Model()
    yield model
    rebind(patch)
    yield model


@case
def an_equinox_module_that_calls_a_helper(patch):
    class Helped(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            return scaled_by_factor(self.weight * x**2)

    model = Helped(jnp.ones(3, F))
    yield model
    rebind(patch)
    yield model


@case
def a_bound_equinox_method_that_calls_a_helper(patch):
    class Helped(eqx.Module):
        weight: jax.Array

        def apply(self, x):
            return scaled_by_factor(self.weight * x**2)

    model = Helped(jnp.ones(3, F))
    yield model.apply
    rebind(patch)
    yield model.apply


@case
def a_leaf_of_an_equinox_module(patch):
    class Activated(eqx.Module):
        activation: object

        def __call__(self, x):
            return self.activation(x**2)

    model = Activated(lambda y: FACTOR * y)
    yield model
    rebind(patch)
    yield model


# The first side: what changed is seen ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_seen(name, monkeypatch):
    functions = CASES[name](monkeypatch)
    close(linjac.linearize_many(next(functions), X)[0], 2 * X**2)
    computes(next(functions), 5.0)
    functions.close()


@pytest.mark.parametrize("name", ["a_global", "a_closure_cell", "an_attribute_of_self", "a_global_dict_of_weights"])
def test_a_change_is_seen_by_the_functional_forms_and_by_recompute(name, monkeypatch):
    functions = CASES[name](monkeypatch)
    for factor in (2.0, 5.0):
        fun = next(functions)
        close(linjac.jvp_many(fun, (X,), (V[None],))[0], 2 * factor * X * V)
        close(linjac.vjp_many(fun, (X,), V[None])[0][0], 2 * factor * X * V)
        close(linjac.linearize_many(fun, X, strategy="recompute")[1](V), 2 * factor * X * V)
        close(linjac.jacobian(fun)(X), jnp.diag(2 * factor * X))


def test_a_change_back_is_seen(monkeypatch):
    def fun(x):
        return FACTOR * x**2

    for factor in (2.0, 5.0, 2.0):
        rebind(monkeypatch, factor)
        computes(fun, factor)


def test_a_rule_alone_is_seen(monkeypatch):
    @jax.custom_jvp
    def forward(x):
        return x**2

    @jax.custom_vjp
    def backward(x):
        return x**2

    forward.defjvp(lambda primals, tangents: (primals[0] ** 2, FACTOR * tangents[0]))
    backward.defvjp(lambda x: (x**2, x), lambda x, c: (FACTOR * c,))
    for factor in (2.0, 5.0):
        rebind(monkeypatch, factor)
        for fun in (forward, backward):
            value, linear_fn = linjac.linearize_many(fun, X)
            close(value, X**2)
            close(linear_fn(V), factor * V)
            close(linear_fn.transpose(V)[0], factor * V)


def test_a_replaced_rule_is_seen():
    @jax.custom_jvp
    def fun(x):
        return x**2

    fun.defjvp(lambda primals, tangents: (primals[0] ** 2, 2.0 * tangents[0]))
    close(linjac.linearize_many(fun, X)[1](V), 2.0 * V)
    fun.defjvp(lambda primals, tangents: (primals[0] ** 2, 5.0 * tangents[0]))
    close(linjac.linearize_many(fun, X)[1](V), 5.0 * V)


def test_a_static_argument_is_looked_into(monkeypatch):
    apply = lambda x, scaled: scaled(x**2)
    scaled = lambda y: FACTOR * y
    for factor in (2.0, 5.0):
        rebind(monkeypatch, factor)
        value, linear_fn = linjac.linearize_many(apply, X, scaled, argnums=0)
        close(value, factor * X**2)
        close(linear_fn(V), 2 * factor * X * V)


def test_a_static_bound_method_argument_is_looked_into():
    class Model:
        def __init__(self):
            self.factor = 2.0

        def scaled(self, y):
            return self.factor * y

    model, apply = Model(), lambda x, scaled: scaled(x**2)
    for factor in (2.0, 5.0):
        model.factor = factor
        value, linear_fn = linjac.linearize_many(apply, X, model.scaled, argnums=0)
        close(value, factor * X**2)
        close(linear_fn(V), 2 * factor * X * V)


@pytest.mark.xfail(raises=AssertionError, reason="what is static in a treedef is not looked into")
def test_a_static_function_in_an_equinox_module_is_looked_into(monkeypatch):
    class Activated(eqx.Module):
        weight: jax.Array
        activation: object = eqx.field(static=True)

        def __call__(self, x):
            return self.activation(self.weight * x**2)

    model = Activated(jnp.ones(3, F), lambda y: FACTOR * y)
    computes(model, 2.0)
    rebind(monkeypatch)
    computes(model, 5.0)


def test_checkpoint_of_a_fixed_function_sees_what_jax_sees(monkeypatch):
    """`jax.checkpoint` keeps its own trace of the function, so JAX does not see the change either."""
    fun = jax.checkpoint(lambda x: FACTOR * x**2)
    for factor in (2.0, 5.0):
        rebind(monkeypatch, factor)
        value, linear_fn = linjac.linearize_many(fun, X)
        close(value, fun(X))
        close(linear_fn(V), jax.jvp(fun, (X,), (V,))[1])


namespace = types.SimpleNamespace(factor=2.0)


def test_an_attribute_of_a_plain_global_object_is_a_documented_limit(monkeypatch):
    """Changed in place, it is not seen; `jit=False`, or another object, is."""

    def fun(x):
        return namespace.factor * x**2

    computes(fun, 2.0)
    monkeypatch.setattr(namespace, "factor", 5.0)
    computes(fun, 2.0)
    close(linjac.linearize_many(fun, X, jit=False)[1](V), 10 * X * V)
    monkeypatch.setitem(globals(), "namespace", types.SimpleNamespace(factor=5.0))
    computes(fun, 5.0)


def test_an_int_in_a_container_is_a_documented_limit():
    """It is a counter more often than not, so a change is not seen; a float, an array, or an int in a cell is."""
    config = {"power": 2}
    fun = lambda x: x ** config["power"]
    close(linjac.linearize_many(fun, X)[0], X**2)
    config["power"] = 3
    close(linjac.linearize_many(fun, X)[0], X**2)
    close(linjac.linearize_many(fun, X, jit=False)[0], X**3)
    power = 2
    fun = lambda x: x**power
    close(linjac.linearize_many(fun, X)[0], X**2)
    power = 3
    close(linjac.linearize_many(fun, X)[0], X**3)


# The other side: nothing retraces when nothing changed ----------------------------------------------------------------

CALLS = []


def _plain():
    def times_two(x):
        CALLS.append(1)
        return 2.0 * x**2

    return times_two


class Counted:
    def __init__(self):
        self.factor = 2.0
        self.calls = 0

    def apply(self, x):
        self.calls += 1
        CALLS.append(1)
        return self.factor * x**2

    def __call__(self, x):
        CALLS.append(1)
        return self.factor * x**2


class CountedModule(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        CALLS.append(1)
        return self.weight * x**2

    def apply(self, x):
        CALLS.append(1)
        return self.weight * x**2


def _appends():
    seen = []

    def fun(x):
        CALLS.append(1)
        seen.append(len(seen))
        return 2.0 * x**2

    return fun


def _counts():
    counter = {"calls": 0, "names": {"x": 0}}

    def fun(x):
        CALLS.append(1)
        counter["calls"] += 1
        counter["names"]["x"] += 1
        return 2.0 * x**2

    return fun


def _appends_arrays():
    shapes = []

    def fun(x):
        CALLS.append(1)
        shapes.append(x.shape)
        return 2.0 * x**2

    return fun


def _nonlocal():
    calls = 0

    def fun(x):
        nonlocal calls
        calls += 1
        CALLS.append(1)
        return 2.0 * x**2

    return fun


def _jitted():
    @jax.jit
    def fun(x):
        CALLS.append(1)
        return 2.0 * x**2

    return fun


def _custom():
    @jax.custom_jvp
    def fun(x):
        CALLS.append(1)
        return 2.0 * x**2

    fun.defjvp(lambda primals, tangents: (2.0 * primals[0] ** 2, 4.0 * primals[0] * tangents[0]))
    return fun


def _weights():
    weights = {"a": [jnp.full(3, 2.0, F)], "b": (None, {"c": 3})}

    def fun(x):
        CALLS.append(1)
        return weights["a"][0] * x**2

    return fun


counted_module = CountedModule(jnp.full(3, 2.0, F))
UNCHANGED = {
    "plain": _plain,
    "appends_to_a_closed_over_list": _appends,
    "counts_in_a_closed_over_dict": _counts,
    "appends_tuples": _appends_arrays,
    "rebinds_a_nonlocal_counter": _nonlocal,
    "jitted": _jitted,
    "custom_jvp": _custom,
    "weights_in_a_dict": _weights,
    "callable_object": Counted,
    "equinox_module": lambda: counted_module,
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_nothing_retraces_when_nothing_changed(name):
    fun = UNCHANGED[name]()
    before = len(CALLS)
    for i in range(20):
        x = X + i
        value, linear_fn = linjac.linearize_many(fun, x)
        close(value, 2 * x**2)
        close(linear_fn(V), 4 * x * V)
    assert len(CALLS) - before == 1


def test_a_fresh_bound_method_object_does_not_retrace():
    """`model.apply` is a new object at each access; so is equinox's own."""
    model = Counted()
    for get in (lambda: model.__call__, lambda: counted_module.apply):
        before = len(CALLS)
        for i in range(20):
            close(linjac.linearize_many(get(), X + i)[0], 2 * (X + i) ** 2)
        assert len(CALLS) - before == 1


def test_a_method_that_counts_its_calls_in_an_attribute():
    """An int attribute that the method itself rebinds is read after the trace, so it does not retrace either."""
    model = Counted()
    for i in range(20):
        close(linjac.linearize_many(model.apply, X + i)[0], 2 * (X + i) ** 2)
    assert model.calls == 1


def test_a_jitted_helper_and_a_static_function_do_not_retrace():
    inner = jax.jit(lambda y: CALLS.append(1) or 2.0 * y)
    apply = lambda x, scaled: scaled(x**2)
    before = len(CALLS)
    for i in range(20):
        close(linjac.linearize_many(apply, X + i, inner, argnums=0)[0], 2 * (X + i) ** 2)
    assert len(CALLS) - before == 1


def test_a_global_with_the_name_of_an_attribute_does_not_retrace(monkeypatch):
    """`x.mean()` reads no global of that name, and neither does `jnp.sin`."""
    calls: list[None] = []

    def fun(x):
        calls.append(None)
        return jnp.sin(x) * x.mean()

    for value in range(4):
        for name in ("mean", "sin"):
            monkeypatch.setitem(globals(), name, jnp.asarray(float(value)))
        linjac.linearize_many(fun, X)
    assert len(calls) == 1


def test_what_is_not_named_does_not_retrace(monkeypatch):
    fun, before = _plain(), len(CALLS)
    for i in range(20):
        monkeypatch.setitem(globals(), "unrelated", i)
        linjac.linearize_many(fun, X + i)
    assert len(CALLS) - before == 1


# A guard keeps nothing alive ------------------------------------------------------------------------------------------


class Node:
    """Points at its parent, which points at it."""

    def __init__(self, parent=None):
        self.parent = parent
        self.weight = jnp.full(3, 2.0, F)
        self.child = Node(self) if parent is None else None

    def apply(self, x):
        return self.child.weight * x**2

    def __call__(self, x):
        return self.child.weight * x**2


class Slotted:
    __slots__ = ("child", "parent", "weight")

    def __init__(self, weight):
        self.weight = weight
        self.parent = self

    def apply(self, x):
        return self.weight * x**2


def gone(*references):
    gc.collect()
    return [r() for r in references if r() is not None] == []


def test_cycles_of_objects_and_attributes_are_collected():
    node = Node()
    references = [weakref.ref(node), weakref.ref(node.child), weakref.ref(node.weight), weakref.ref(node.child.weight)]
    computes(node.apply, 2.0)
    computes(node, 2.0)
    del node
    assert gone(*references)


def test_an_object_without_weak_references_is_collected():
    model = Slotted(jnp.full(3, 2.0, F))
    reference = weakref.ref(model.weight)
    computes(model.apply, 2.0)
    del model
    assert gone(reference)


def _recursive():
    weight = jnp.full(3, 2.0, F)

    def fun(x, depth=0):
        return weight * x**2 if depth == 1 else fun(x, 1)

    return fun, weight


def _mutual():
    weight = jnp.full(3, 2.0, F)

    def first(x):
        return second(x)

    def second(x, again=False):
        return first(x) if again else weight * x**2

    return first, weight


def _attribute_that_closes_over_self():
    class Model:
        def __init__(self):
            self.weight = jnp.full(3, 2.0, F)
            self.loss = lambda x: self.weight * x**2

    model = Model()
    return model.loss, model.weight


def _dict_that_holds_the_function():
    tools = {"weight": jnp.full(3, 2.0, F)}
    tools["fun"] = lambda x: tools["weight"] * x**2
    return tools["fun"], tools["weight"]


@pytest.mark.parametrize(
    "make",
    [_recursive, _mutual, _attribute_that_closes_over_self, _dict_that_holds_the_function],
    ids=lambda f: f.__name__,
)
def test_functions_within_reach_of_their_own_closure_are_collected(make):
    fun, weight = make()
    references = [weakref.ref(fun), weakref.ref(weight)]
    close(linjac.linearize_many(fun, X)[0], 2 * X**2)
    del fun, weight
    assert gone(*references)


def test_what_was_replaced_is_collected():
    model = Node()
    computes(model.apply, 2.0)
    old = weakref.ref(model.child.weight)
    model.child = Node(model)
    model.child.weight = jnp.full(3, 5.0, F)
    computes(model.apply, 5.0)
    assert gone(old)


def test_replaced_weights_in_a_closed_over_dict_are_collected():
    weights = {"factor": jnp.full(3, 2.0, F)}
    fun = lambda x: weights["factor"] * x**2
    computes(fun, 2.0)
    old = weakref.ref(weights["factor"])
    weights["factor"] = jnp.full(3, 5.0, F)
    computes(fun, 5.0)
    assert gone(old)


def test_a_static_argument_is_collected():
    def use():
        weight = jnp.full(3, 2.0, F)
        apply, scaled = (lambda x, scaled: scaled(x**2)), (lambda y: weight * y)
        close(linjac.linearize_many(apply, X, scaled, argnums=0)[0], 2 * X**2)
        return weakref.ref(weight), weakref.ref(apply), weakref.ref(scaled)

    assert gone(*use())


def test_an_array_whose_identity_is_used_again_is_not_mistaken_for_the_old_one():
    """A dead object's address may be given to the next: the guard says so, instead of comparing addresses alone."""

    holder = [None]
    fun = lambda x: holder[0] * x**2
    for factor in (2.0, 5.0, 7.0):
        holder[0] = None
        gc.collect()
        holder[0] = jnp.full(3, factor, F)
        computes(fun, factor)


# What containers hold, and where -------------------------------------------------------------------------------------
def test_a_container_that_was_empty_when_traced():
    over, terms = {}, []

    def fun(x):
        return over.get("scale", 1.0) * x + sum(terms)

    close(linjac.jacobian(fun)(X), np.eye(3))
    over["scale"] = 4.0
    close(linjac.jacobian(fun)(X), 4 * np.eye(3))
    terms.append(7.0)
    close(linjac.value_and_jacobian(fun)(X)[0], 4 * X + 7)


def test_an_attribute_that_was_an_empty_list():
    class Sum:
        def __init__(self):
            self.terms = []

        def apply(self, x):
            return x * (2 + sum(self.terms))

    model = Sum()
    close(linjac.jacobian(model.apply)(X), 2 * np.eye(3))
    model.terms.append(5.0)
    close(linjac.jacobian(model.apply)(X), 7 * np.eye(3))


def test_the_same_leaves_under_other_keys_or_elsewhere():
    limits, nested = {"high": 2.0}, [[], [3.0]]

    def by_key(x):
        return limits.get("cap", 9.0) * x

    def by_place(x):
        return (nested[0][0] if nested[0] else 1.0) * x

    close(linjac.jacobian(by_key)(X), 9 * np.eye(3))
    close(linjac.jacobian(by_place)(X), np.eye(3))
    limits["cap"] = limits.pop("high")
    nested.reverse()
    close(linjac.jacobian(by_key)(X), 2 * np.eye(3))
    close(linjac.jacobian(by_place)(X), 3 * np.eye(3))


def test_shapes_noted_while_tracing_retrace_nothing():
    """Two signatures of one function take turns: what each notes at its own trace is no change to the other."""
    shapes, calls = {}, []

    def fun(x):
        calls.append(None)
        shapes.setdefault("seen", []).append(x.shape)
        return 2.0 * x

    for _ in range(4):
        linjac.jacobian(fun)(X)
        linjac.jacobian(fun)(X[:2])
    assert len(calls) <= 3


@pytest.mark.parametrize("form", ["import", "from"])
def test_a_module_imported_by_the_function(form, monkeypatch):
    settings = types.ModuleType("linjac_test_settings")
    settings.SCALE = 2.0
    monkeypatch.setitem(sys.modules, "linjac_test_settings", settings)

    def imports(x):
        import linjac_test_settings

        return linjac_test_settings.SCALE * x

    def imports_from(x):
        from linjac_test_settings import SCALE

        return SCALE * x

    fun = imports if form == "import" else imports_from
    close(linjac.jacobian(fun)(X), 2 * np.eye(3))
    settings.SCALE = 5.0
    close(linjac.jacobian(fun)(X), 5 * np.eye(3))
