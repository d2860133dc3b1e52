"""One decision for one call: check what may be differentiated, plan (or measure), and refuse what cannot fit.

Decisions are kept with the program, so that a call at a new point costs a look-up.
"""

import jax

from linjac import _watch
from linjac._acceptance import check_inputs, check_outputs
from linjac._choice import make_plan
from linjac._errors import MemoryBudgetError, compose
from linjac._measure import fastest, with_note
from linjac._memory import memory_of
from linjac._plan import OTHER, JacobianPlan, Options, work_of
from linjac._program import Data, Program, alive
from linjac._tree import in_trace, inside_transformation

SMALL = 1 << 20  # bytes of a result that is not compared with the memory there is


def decide(who: str, program: Program, data: Data, options: Options, repeated: JacobianPlan | None) -> JacobianPlan:
    """The plan for a call; `repeated` is a plan given as mode, whose decision is taken over."""
    key = ("plan", options)
    plan: JacobianPlan | None = program.notes.get(key)
    if plan is None or options.mode == "measure":
        holomorphic, allow_int = options.holomorphic, options.allow_int
        check_inputs(who, program, holomorphic=holomorphic, allow_int=allow_int, hold=options.hold)
        check_outputs(who, program, holomorphic=holomorphic)
        plan = _measured(who, program, data, options) if options.mode == "measure" else None
        plan = plan or make_plan(who, program, data, options)
        program.notes[key] = plan
    if repeated is not None and (plan.m, plan.n) != (repeated.m, repeated.n):
        here = f"{plan.n} inputs and {plan.m} outputs"
        what = f"the plan was made for {repeated.n} inputs and {repeated.m} outputs, not for {here}"
        raise ValueError(compose(who, what, remedy="make a plan for these arguments with linjac.plan_jacobian"))
    limit = alive(who, memory_of, data.point) if plan.result_bytes > SMALL else SMALL
    if plan.result_bytes > limit:
        what = f"the Jacobian is {plan.m} x {plan.n}, {plan.result_bytes:,} bytes; there are {limit:,} bytes of memory"
        remedy = "use linjac.linearize_many and its products, or linjac.jvp_many for some directions"
        raise MemoryBudgetError(compose(who, what, remedy=remedy))
    return plan


def admit(plan: JacobianPlan, beside: int = 0) -> None:
    """Tell the active monitors what is about to be done; they may refuse it. `beside` are bytes of value and aux."""
    _watch.admit(work_of(plan), beside)


def _no_measurement(program: Program, data: Data) -> str:
    """Why nothing can be timed, or an empty string."""
    if not program.compiled:
        return "op by op"
    if in_trace(*data) or inside_transformation():
        return "inside a trace, with no cached answer"
    return "types without values" if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in data.point) else ""


def _measured(who: str, program: Program, data: Data, options: Options) -> JacobianPlan:
    """The cached answer of a measurement, a new one, or under tracing the size rule; the plan says which."""
    key = ("measured", options)
    known: JacobianPlan | None = program.notes.get(key)
    if known is not None:
        return known
    by_size = make_plan(who, program, data, options._replace(mode="auto"))
    obstacle = _no_measurement(program, data)
    if obstacle:
        return with_note(by_size, f"not measured: {obstacle}; chosen by the size rule")
    admit(by_size)
    other = OTHER[by_size.mode]
    if other in dict(by_size.ruled_out):
        return with_note(by_size, f"not measured: {other} is ruled out")
    second = make_plan(who, program, data, options._replace(mode=other))
    if _watch.would_refuse(work_of(second)):
        return with_note(by_size, f"not measured: {other} is beyond a limit of an active linjac.Monitor")
    found = program.notes[key] = fastest(program, data, (by_size, second))
    return found
