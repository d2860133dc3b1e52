"""The mode grid: `linjac.jacobian` in `auto` and `measure` against the better of jitted `jax.jacfwd` and `jax.jacrev`.

143 points: six families at n·m = 2^16 and all but the outer products at n·m = 2^14, m/n from 1/64 to 64. Points over
the bar are measured again with more rounds.

    python tests/benchmarks/bench_modes.py [--measure] [family ...]
"""

import statistics
import sys

import jax
from families import FAMILIES
from timing import footer, header, interleaved, noise, row

import linjac

BAR, WORST, MEASURED = 1.10, 1.30, 1.15
POINTS = [(2**16, family) for family in FAMILIES] + [
    (2**14, family) for family in FAMILIES if family != "outer_product"
]


def point(size: int, family: str, k: int, *, mode: str, rounds: int) -> tuple[float, str]:
    """Time over that of the better mode, and the mode that was chosen."""
    n, m = round(size**0.5 * 2 ** (-k / 2)), round(size**0.5 * 2 ** (k / 2))
    fun, x = FAMILIES[family](n, m)
    plan = linjac.plan_jacobian(fun, mode=mode)(x)
    programs = {
        "linjac": jax.jit(linjac.jacobian(fun, mode=plan)),
        "jacfwd": jax.jit(jax.jacfwd(fun)),
        "jacrev": jax.jit(jax.jacrev(fun)),
    }
    calls = {name: lambda program=program: program(x) for name, program in programs.items()}
    times = interleaved(calls, rounds=rounds, target=0.003, cap=1.5 if rounds < 20 else 5.0)
    best = min(("jacfwd", "jacrev"), key=times.median)
    return times.ratio("linjac", best), f"{plan.n} -> {plan.m} {plan.mode} (better: {best})"


def grid(families: list[str], mode: str) -> dict[str, list[float]]:
    """The ratios of every point, by family."""
    ratios: dict[str, list[float]] = {}
    bar = BAR if mode == "auto" else MEASURED
    for size, family in POINTS:
        if families and family not in families:
            continue
        here: list[float] = []
        for k in range(-6, 7):
            ratio, text = point(size, family, k, mode=mode, rounds=9)
            if ratio > bar:
                ratio, text = point(size, family, k, mode=mode, rounds=41)
            here.append(ratio)
            if ratio > bar:
                row(f"  {family} {text}", f"{ratio:.2f}")
        ratios.setdefault(family, []).extend(here)
        row(
            f"{family}, {size} entries: median, worst of {len(here)}", f"{statistics.median(here):.2f}, {max(here):.2f}"
        )
    return ratios


def main(argv: list[str]) -> None:
    """Print the share of points within the bar, and the worst."""
    mode = "measure" if "--measure" in argv else "auto"
    header(f"mode grid, mode={mode!r}")
    fun, x = FAMILIES["dense"](256, 256)
    program = jax.jit(jax.jacfwd(fun))
    low, high = noise(lambda: program(x))
    row("jacfwd against itself, quartiles", f"{low:.2f} to {high:.2f}")
    ratios = grid([arg for arg in argv if not arg.startswith("-")], mode)
    kept = [value for family, values in ratios.items() if family != "outer_product" for value in values]
    if kept:
        share = sum(value <= BAR for value in kept) / len(kept)
        row(f"within {BAR} of the better mode, {len(kept)} points", f"{share:.0%}", ">= 90 %", share >= 0.9)
        row("worst point", f"{max(kept):.2f}", f"<= {WORST}", max(kept) <= WORST)
    footer()


if __name__ == "__main__":
    main(sys.argv[1:])
