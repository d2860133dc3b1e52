"""Draw how long each mode of a Jacobian takes: every sample, not one figure.

Three functions of different shape are measured with `linjac.measure_jacobian`, jitted `jax.jacfwd` and `jax.jacrev`
beside the modes of linjac. Each panel shows one function. A dot is a sample, the bar spans the quartiles, the tick is
the median, and the heading says who wins, or that nobody does.

Run it from the root of the repository: `python docs/examples/plot_modes.py modes.png`.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import linjac

BLUE, GRAY = "#1f6feb", "#8c8c8c"


# --- what is measured ------------------------------------------------------------------------------------------------


def functions():
    """Name, function and point: few inputs, as many inputs as outputs, few outputs."""
    keys = jax.random.split(jax.random.key(0), 4)
    tall = jax.random.normal(keys[0], (2048, 8))
    first, second = jax.random.normal(keys[1], (2, 256, 256)) / 16.0
    wide = jax.random.normal(keys[2], (8, 2048)) / 45.0
    return [
        ("8 inputs, 2048 outputs", lambda x: jnp.tanh(tall @ x), jnp.ones(8)),
        ("256 inputs, 256 outputs, two dense layers", lambda x: second @ jnp.tanh(first @ x), jnp.ones(256)),
        ("2048 inputs, 8 outputs", lambda x: jnp.tanh(wide @ x), jnp.ones(2048)),
    ]


def measure(rounds=30):
    """One report for each function."""
    found = []
    for name, fun, x in functions():
        report = linjac.measure_jacobian(fun, rounds=rounds, yardsticks=True)(x)
        print(report, end="\n\n")
        found.append((name, report))
    return found


# --- the picture -----------------------------------------------------------------------------------------------------


def draw(found, path):
    """One panel for each (name, report), saved at `path`."""
    figure = Figure(figsize=(8.0, 1.9 * len(found)), layout="constrained")
    panels = figure.subplots(len(found), squeeze=False)[:, 0]
    for axes, (name, report) in zip(panels, found, strict=True):
        draw_panel(axes, name, report)
    panels[-1].set_xlabel("microseconds of one call, logarithmic; dots: samples, bar: quartiles, tick: median")
    figure.savefig(path, dpi=90)


def draw_panel(axes, name, report):
    """A row of dots for each candidate, the first on top."""
    timings = [*report.candidates, *report.yardsticks]
    spread = np.random.default_rng(0)
    for row, timing in enumerate(timings):
        color = GRAY if timing.plan is None else BLUE
        micros = 1e6 * np.asarray(timing.seconds)
        axes.plot(micros, row + spread.uniform(-0.25, 0.25, micros.size), "o", color=color, markersize=3, alpha=0.5)
        axes.hlines(row, *(1e6 * timing.quantile(q) for q in (0.25, 0.75)), color=color, linewidth=5, alpha=0.6)
        axes.vlines(1e6 * timing.median, row - 0.35, row + 0.35, color="black", linewidth=1.5)
    axes.set_yticks(range(len(timings)), [timing.label for timing in timings])
    axes.invert_yaxis()
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    digits = "25" if high > 10 * low else "23456789"  # which minor ticks get a number
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in digits else "")
    axes.tick_params(axis="x", which="both", labelsize=8)
    axes.grid(axis="x", which="both", alpha=0.25)
    axes.set_title(f"{name}: {report.verdict.partition(':')[0]}", fontsize=10, loc="left")


def main(path, rounds=30):
    """Measure, draw and return the reports."""
    found = measure(rounds)
    draw(found, path)
    return [report for _, report in found]


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "modes.png")
