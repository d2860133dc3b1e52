"""What `import linjac` adds to `import jax`, in fresh processes that take turns.

python tests/benchmarks/bench_import.py
"""

import random
import statistics
import subprocess
import sys

ROUNDS = 11  # of linjac and jax; the parts that explain the difference take fewer
FEW = 3
CODE = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
PARTS = {
    "linjac": "linjac",
    "jax": "jax",
    "jax again": "jax",
    "dependencies": "jax, jaxtyping, beartype, jax.extend.core.primitives",
}


def seconds(modules: str) -> float:
    """Seconds that an import takes in a new process."""
    code = CODE.format(modules)
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def version() -> str:
    """JAX's version, without importing it here."""
    code = "import jax; print(jax.__version__)"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Print the median of the paired ratios."""
    samples: dict[str, list[float]] = {name: [] for name in PARTS}
    for name in PARTS:
        seconds(PARTS[name])  # bytecode and disk caches
    order, shuffle = list(PARTS), random.Random(0).shuffle
    for done in range(ROUNDS):
        shuffle(order)
        for name in order:
            if done < FEW or name in ("linjac", "jax"):
                samples[name].append(seconds(PARTS[name]))

    def added(name: str) -> float:
        ratios = [a / b for a, b in zip(samples[name], samples["jax"], strict=False)]
        return 100 * (statistics.median(ratios) - 1)

    def fastest(name: str) -> float:
        return 100 * (min(samples[name]) / min(samples["jax"]) - 1)

    print(f"\nimport linjac against import jax  [JAX {version()}; medians of {ROUNDS} pairs; the fastest of each]")
    for name, target in (("linjac", 25), ("dependencies", None), ("jax again", None)):
        met = "" if target is None else ("ok" if added(name) <= target else "MISSED")
        goal = "" if target is None else f"<= {target} %"
        print(f"  {name:<16s} adds {added(name):6.1f} %  ({fastest(name):6.1f} %)   {goal:<10s} {met}".rstrip())
    print(f"  for orientation: import jax takes {statistics.median(samples['jax']):.2f} s")


if __name__ == "__main__":
    main()
