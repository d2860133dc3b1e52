"""The documentation is true: its code runs and prints what the page says.

Every ```python block of README.md and docs/**/*.md runs, in order, in one namespace for each page. A ```text block that
directly follows a ```python block is what that block prints; `...` stands for any text.
"""

import contextlib
import doctest
import importlib.util
import io
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import linjac

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@contextlib.contextmanager
def reader_config():
    """JAX as a reader of the page has it: the defaults, not the strict settings of the suite."""
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def blocks_of(page):
    """The page's fenced blocks as (language, line number, text)."""
    text = page.read_text()
    return [(m[1], text.count("\n", 0, m.start(2)), m[2]) for m in FENCE.finditer(text)]


def run(code, page, line, namespace):
    """Run a block and return what it prints; tracebacks point into the page."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), reader_config():
        exec(compile("\n" * line + code, str(page), "exec"), namespace)
    return printed.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_prints_what_it_says(page):
    namespace = {"__name__": page.stem.replace("-", "_")}
    checker = doctest.OutputChecker()
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    printed = None
    for language, line, text in blocks_of(page):
        where = f"{page.relative_to(ROOT)}:{line}"
        if language == "python":
            printed = run(text, page, line, namespace)
        elif language == "text":
            assert printed is not None, f"{where}: a text block must directly follow a python block"
            assert checker.check_output(text, printed, flags), f"{where} says\n{text}\nand the code prints\n{printed}"
            printed = None
        else:
            assert language, f"{where}: a fenced block names its language"
            printed = None


def test_readme_example_runs_and_is_compared():
    languages = [language for language, _, _ in blocks_of(ROOT / "README.md")]
    assert languages.count("python") >= 1
    assert languages.count("text") >= 1


def test_reference_lists_every_public_name():
    reference = (ROOT / "docs" / "reference.md").read_text()
    missing = [name for name in linjac.__all__ if f"linjac.{name}" not in reference]
    assert not missing


def test_reference_describes_every_public_name():
    reference = (ROOT / "docs" / "reference.md").read_text()
    missing = [name for name in linjac.__all__ if f"::: linjac.{name}\n" not in reference + "\n"]
    assert not missing


def test_architecture_lists_every_module():
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    modules = {path.name for path in (ROOT / "src" / "linjac").glob("*.py")}
    assert set(re.findall(r"^\| `(\w+\.py)` \|", page, re.MULTILINE)) == modules


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / ".mkdocs.yml").read_text()
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    missing = [page for page in pages if page not in navigation]
    assert not missing


def test_quickstart(capsys):
    path = ROOT / "docs" / "examples" / "quickstart.py"
    spec = importlib.util.spec_from_file_location("quickstart", path)
    quickstart = importlib.util.module_from_spec(spec)
    with reader_config():
        spec.loader.exec_module(quickstart)
        rows, neighbors = quickstart.main(steps=60, every=20)
    assert [row.step for row in rows] == [0, 20, 40, 60]
    assert rows[-1].loss < 0.5 * rows[0].loss
    for row in rows:
        # The update is small, so the linear prediction is close; not exact, or nothing was measured.
        assert 0 < row.error < 0.1
        assert row.predicted == pytest.approx(row.actual, rel=0.1)
        assert set(row.movement) == {"hidden", "output"}
        assert all(size > 0 for size in row.movement.values())
    assert [row.digit for row in neighbors] == list(range(10))
    for row in neighbors:
        # One step along the rows of the Jacobian undoes most of the lead, or the rows were not the right ones.
        assert row.closest != row.read_as
        assert row.distance > 0
        assert abs(row.there) < 0.3 * row.lead + 0.1
    printed = capsys.readouterr().out
    assert "10 reverse sweeps in 1 chunk instead of 64 forward sweeps" in printed
    assert "held-out" in printed
    assert len([line for line in printed.splitlines() if line.endswith(f"{rows[-1].movement['output']:.4f}")]) == 1


def test_what_model_code_seldom_needs_is_loaded_at_its_first_use():
    code = (
        "import sys, linjac\n"
        "later = {'linjac._modes', 'linjac._monitor', 'linjac.testing'}\n"
        "assert not later & set(sys.modules), later & set(sys.modules)\n"
        "assert all(getattr(linjac, name) for name in linjac.__all__) and linjac.testing.CheckReport\n"
        "assert later <= set(sys.modules) and {*linjac.__all__, 'testing'} <= set(dir(linjac))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    with pytest.raises(AttributeError, match="module 'linjac' has no attribute 'nothing'"):
        linjac.nothing  # noqa: B018
