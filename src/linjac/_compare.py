"""Compare what a case gives with what it gave when it was recorded, leaf by leaf.

A NaN has to stand where a NaN stood, an infinity where one of its sign stood. This module must not know files, nor
how the results were computed.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from linjac._fingerprint import figures, places, to_reals
from linjac._observe import Observed, Result, is_exact, reduced
from linjac._report import FAILED, PASSED, SKIPPED, Criterion, Difference
from linjac._tolerances import Tolerances
from linjac._tree import short_dtype


def allowed_for(tolerance: Tolerances, leaf: float, largest: float, entries: int = 1) -> float:
    """The largest difference that is allowed, for the size of a leaf and of the largest beside it."""
    limit = tolerance.rtol * leaf + tolerance.atol * math.sqrt(entries)
    return limit if tolerance.given else limit + 8 * tolerance.eps * largest


# a case ---------------------------------------------------------------------------------------------------------------
def compare_case(name: str, old: Observed, new: Observed, tolerance: Tolerances) -> list[Criterion]:
    """The criteria of one case."""
    case = f"case {name!r}: "
    later = {
        "value": f"{case}value",
        "products": f"{case}J v and Jᵀ c along fixed directions",
        "blocks": f"{case}norms and projections of the Jacobian",
    }
    structure = _structure(old, new)
    found = [_criterion(f"{case}tree of the output", "structure", structure)]
    if not structure:
        types = _types(old, new)
        found.append(_criterion(f"{case}leaves of the output and blocks of the Jacobian", "shapes and dtypes", types))
        if not types:
            values = _vector(old.value, new.value, tolerance)
            found.append(_judged(later["value"], "value", "", values))
            found.append(_products(later["products"], old, new, tolerance))
            return [*found, _blocks(later["blocks"], old, new, tolerance)]
    reason = f"the {found[-1].stage} differ" if found[-1].stage != "structure" else "the structure differs"
    stages = {"value": "value", "products": "products", "blocks": "products"}
    return [*found, *(Criterion(later[key], stage, SKIPPED, reason) for key, stage in stages.items())]


def _criterion(name: str, stage: str, lines: Sequence[str]) -> Criterion:
    more = f"; and {len(lines) - 5} more" if len(lines) > 5 else ""
    return Criterion(name, stage, FAILED if lines else PASSED, "; ".join(lines[:5]) + more)


def _judged(name: str, stage: str, detail: str, differences: Sequence[Difference]) -> Criterion:
    worst = sorted(differences, key=lambda d: -(d.error / d.allowed if d.allowed else math.inf))
    return Criterion(name, stage, FAILED if worst else PASSED, detail, tuple(worst))


def _structure(old: Observed, new: Observed) -> list[str]:
    if old.tree == new.tree:
        return []
    before, after = ([result.name for result in seen.value] for seen in (old, new))
    lines = [f"{name}: missing" for name in before if name not in after]
    lines += [f"{name}: new" for name in after if name not in before]
    return lines or ["the kinds of containers differ"]


def _short(result: Result) -> str:
    return f"{short_dtype(result.dtype)}[{','.join(map(str, result.shape))}]"


def _types(old: Observed, new: Observed) -> list[str]:
    lines = _leaf_types(old.value, new.value)
    shapes = old.jacobian["shape"], new.jacobian["shape"]
    if shapes[0] != shapes[1]:
        lines.append(f"the Jacobian: recorded {tuple(shapes[0])}, now {tuple(shapes[1])}")
    tables = [{(b["output"], b["input"]): b["dtype"] for b in seen.jacobian["blocks"]} for seen in (old, new)]
    for output, name in dict.fromkeys([*tables[0], *tables[1]]):
        dtypes = [short_dtype(table[output, name]) if (output, name) in table else "absent" for table in tables]
        if dtypes[0] != dtypes[1]:
            lines.append(f"block of {output} with respect to {name}: recorded {dtypes[0]}, now {dtypes[1]}")
    return lines


def _leaf_types(old: Sequence[Result], new: Sequence[Result]) -> list[str]:
    if [result.name for result in old] != [result.name for result in new]:
        return ["other leaves than recorded"]
    pairs = [(before, after) for before, after in zip(old, new, strict=True) if _short(before) != _short(after)]
    return [f"{before.name}: recorded {_short(before)}, now {_short(after)}" for before, after in pairs]


def _products(name: str, old: Observed, new: Observed, tolerance: Tolerances) -> Criterion:
    if (old.reverse is None) != (new.reverse is None):
        there = "was none and is one now" if old.reverse is None else "was one and is none now"
        return Criterion(name, "products", FAILED, f"the reverse direction: there {there}")
    pairs = [*zip(old.forward, new.forward, strict=False), *zip(old.reverse or [], new.reverse or [], strict=False)]
    lines = [line for before, after in pairs for line in _leaf_types(before, after)]
    if len(old.forward) != len(new.forward) or len(old.reverse or []) != len(new.reverse or []):
        lines = ["other directions than recorded"]
    if lines:
        return _criterion(name, "products", lines)
    differences = [d for before, after in pairs for d in _vector(before, after, tolerance)]
    return _judged(
        name, "products", "" if old.reverse is not None else "no reverse direction, as recorded", differences
    )


# leaves ---------------------------------------------------------------------------------------------------------------
def _vector(old: Sequence[Result], new: Sequence[Result], tolerance: Tolerances) -> list[Difference]:
    """The leaves of one vector that differ."""
    largest = max((_size(result) for result in old), default=0.0)
    pairs = [_difference(before, after, tolerance, largest) for before, after in zip(old, new, strict=True)]
    return [difference for difference in pairs if difference is not None]


def _size(result: Result) -> float:
    if is_exact(result):
        return 0.0
    return result.figures[0] if result.array is None else _top(_finite(to_reals(result.array)))


def _finite(flat: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(flat), flat, 0.0)


def _top(flat: np.ndarray) -> float:
    return float(np.max(np.abs(flat), initial=0.0))


def _difference(old: Result, new: Result, tolerance: Tolerances, largest: float) -> Difference | None:
    assert new.array is not None
    if is_exact(old):
        return _exact(old, new)
    if old.array is None:
        return _by_figures(old, new, tolerance, largest)
    before, after = to_reals(old.array), to_reals(new.array)
    norms = figures(old.array)[0], figures(new.array)[0]
    width = 2 if np.iscomplexobj(old.array) else 1
    allowed = allowed_for(tolerance, _top(_finite(before)), largest)
    with np.errstate(all="ignore"):
        errors = np.abs(_finite(before) - _finite(after))
    kinds = [places(result.array) for result in (old, new)]
    here, there = (np.zeros(before.shape, np.uint8) if kind is None else kind for kind in kinds)
    errors = np.where(here != there, np.inf, errors)
    if not errors.size or errors.max() <= allowed:
        return None
    worst = int(errors.argmax())
    index = tuple(int(i) for i in np.unravel_index(worst // width, old.shape))
    return Difference(old.name, None, index, float(errors[worst]), allowed, *norms)


def _exact(old: Result, new: Result) -> Difference | None:
    assert new.array is not None
    if old.array is None:
        same = reduced(new).sha256 == old.sha256
        return None if same else Difference(old.name, None, (), math.nan, 0.0, math.nan, math.nan)
    if np.array_equal(old.array, new.array):
        return None
    before, after = (result.array.astype(np.float64) for result in (old, new) if result.array is not None)
    errors = np.abs(before - after)
    worst = int((old.array != new.array).ravel().argmax()) if not errors.max() else int(errors.argmax())
    index = tuple(int(i) for i in np.unravel_index(worst, errors.shape))
    norms = float(np.linalg.norm(before)), float(np.linalg.norm(after))
    return Difference(old.name, None, index, float(errors.ravel()[worst]), 0.0, *norms)


def _by_figures(old: Result, new: Result, tolerance: Tolerances, largest: float) -> Difference | None:
    brief = reduced(new)
    errors = _figure_errors(old.figures, brief.figures, old.places == brief.places)
    entries = math.prod(old.shape)
    allowed = allowed_for(tolerance, max(map(abs, old.figures)), largest, entries)
    if max(errors) <= allowed:
        return None
    return Difference(old.name, None, (), max(errors), allowed, old.figures[0], brief.figures[0])


def _figure_errors(old: Sequence[float], new: Sequence[float], same_places: bool) -> list[float]:
    if not same_places:
        return [math.inf]
    return [abs(before - after) if before != after else 0.0 for before, after in zip(old, new, strict=True)]


# the Jacobian ---------------------------------------------------------------------------------------------------------
_HOW = {"fwd": "all columns swept", "rev": "all rows swept", "sampled": "sampled: products along fixed directions"}


def _blocks(name: str, old: Observed, new: Observed, tolerance: Tolerances) -> Criterion:
    how = old.jacobian["how"]
    if how != new.jacobian["how"]:
        return Criterion(name, "products", SKIPPED, f"recorded by {_HOW[how]}, which cannot be had now")
    pairs: list[tuple[Any, Any]] = list(zip(old.jacobian["blocks"], new.jacobian["blocks"], strict=True))
    largest = max((block["figures"][0] for block, _ in pairs), default=0.0)
    entries = math.prod(old.jacobian["shape"])
    differences: list[Difference] = []
    for before, after in pairs:
        errors = _figure_errors(before["figures"], after["figures"], before["odd"] == after["odd"])
        allowed = allowed_for(tolerance, max(map(abs, before["figures"])), largest, entries)
        if not max(errors) <= allowed:
            norms = before["figures"][0], after["figures"][0]
            differences.append(Difference(before["output"], before["input"], (), max(errors), allowed, *norms))
    return _judged(name, "products", _HOW[how], differences)
