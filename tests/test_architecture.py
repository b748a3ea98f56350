"""The rules between the folders, read from the source: who may import whom, what is loaded, how long a file is."""

from __future__ import annotations

import ast
import functools
import graphlib
import itertools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kernels", "engine", "sim", "calibrate", "explore")
PLAN_SIDE = (
    "errors",
    "shapes",
    "config",
    "plan",
    "work",
    "policies",
    "memory",
    "loader",
    "rope",
    "model_config",
    "occupancy",
    "actions",
    "dynamics",
)
MOST_LINES = 400

PLAN = tuple(f"sparda.engine.{name}" for name in PLAN_SIDE)
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "kernels": ("sparda.kernels",),
    "engine": ("sparda.engine", "sparda.kernels"),
    "plan side of engine": PLAN,
    "sim": ("sparda.sim", *PLAN),
    "calibrate": ("sparda.calibrate", "sparda.engine", "sparda.kernels", "sparda.sim"),
    "explore": tuple(f"sparda.{folder}" for folder in FOLDERS),
}
"""Prefixes of the modules that a layer may import from this project."""

WITHOUT_TORCH = ("sparda.sim", "sparda.calibrate", "sparda.explore", *PLAN)
MEASURES = "sparda.calibrate.measure"
"""The one part of calibrate that runs on a GPU."""


@dataclass(frozen=True)
class Import:
    """One import of one of the project's modules; ``loads`` where it runs when its module is loaded."""

    module: str
    line: int
    loads: bool


def within(module: str, *prefixes: str) -> bool:
    return any(module == p or module.startswith(p + ".") for p in prefixes)


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(("sparda", *(parts[:-1] if parts[-1] == "__init__" else parts)))


@functools.cache
def sources() -> dict[str, Path]:
    """Every module of the project and its file."""
    files = (f for folder in FOLDERS for f in sorted((ROOT / folder).rglob("*.py")))
    return {module_name(f): f for f in files}


@functools.cache
def imports_of(module: str) -> tuple[tuple[Import, ...], tuple[str, ...]]:
    """The project's modules that ``module`` imports, and its imports of another form than ``sparda.…``."""
    file = sources()[module]
    found: list[Import] = []
    odd: list[str] = []
    for node, loads in _walk(ast.parse(file.read_text(encoding="utf-8"), str(file)), True):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            base = node.module or ""
            names = [_deepest(f"{base}.{alias.name}", base) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            odd.append(f"{_place(file, node.lineno)}: a relative import; write it from sparda on")
            continue
        else:
            continue
        found += [Import(name, node.lineno, loads) for name in names if within(name, "sparda")]
        bare = [name for name in names if name.split(".")[0] in FOLDERS]
        odd += [f"{_place(file, node.lineno)}: imports {name}; write sparda.{name}" for name in bare]
    return tuple(found), tuple(odd)


def _deepest(name: str, base: str) -> str:
    """``from base import x`` names the module base.x where there is one, else base."""
    return name if name in sources() else base


def _walk(node: ast.AST, loads: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Every node below, and whether it runs when the module is loaded."""
    for child in ast.iter_child_nodes(node):
        yield child, loads
        later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        yield from _walk(child, loads and not later and not typing_only)


def _place(file: Path, line: int) -> str:
    return f"{file.relative_to(ROOT)}:{line}"


def layer_of(module: str) -> str:
    return "plan side of engine" if within(module, *PLAN) else module.split(".")[1]


def complain(problems: list[str], rule: str) -> None:
    if problems:
        pytest.fail(rule + "\n  " + "\n  ".join(problems), pytrace=False)


def test_a_folder_imports_only_from_itself_and_the_folders_below_it() -> None:
    problems: list[str] = []
    for module, file in sources().items():
        found, odd = imports_of(module)
        problems += odd
        layer = layer_of(module)
        problems += [
            f"{_place(file, i.line)}: {layer} imports {i.module}; it may import {', '.join(MAY_IMPORT[layer])}"
            for i in found
            if not within(i.module, *MAY_IMPORT[layer])
        ]
    complain(problems, "Imports point downwards: kernels < engine < sim (plan side only) < calibrate < explore.")


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {m: {i.module for i in imports_of(m)[0] if i.loads and i.module != m} for m in sources()}
    circle: list[str] = []
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        circle = error.args[1][::-1]
    steps = [
        f"{_place(sources()[a], next(i.line for i in imports_of(a)[0] if i.module == b))}: {a} imports {b}"
        for a, b in itertools.pairwise(circle)
    ]
    complain(steps, "These modules import each other in a circle; move what they share into a module of its own.")


LOADER = """
import importlib, sys, traceback

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is not to be loaded here", name=name)

blocked = sys.argv[1].split(",")
sys.meta_path.insert(0, Blocked())
failed = 0
for module in sys.argv[2:]:
    try:
        importlib.import_module(module)
    except Exception as error:
        failed += 1
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f for f in frames if "<" not in f.filename and "importlib" not in f.filename]
        place = f"{ours[-1].filename}:{ours[-1].lineno}" if ours else "?"
        print(f"{module}: {type(error).__name__}: {error} ({place})")
sys.exit(bool(failed))
"""


def test_planning_simulating_and_exploring_load_without_torch() -> None:
    modules = [m for m in sources() if within(m, *WITHOUT_TORCH) and not within(m, MEASURES) and "__main__" not in m]
    complain(cannot_load(modules, "torch,triton"), "These modules must load on a machine without torch and triton.")


def test_measuring_loads_without_the_simulator_the_search_and_the_plots() -> None:
    pytest.importorskip("triton", reason="measuring needs torch and triton: pip install 'sparda[engine]'")
    modules = [m for m in sources() if within(m, MEASURES, "sparda.explore.cli")]
    modules = [m for m in modules if "__main__" not in m]
    complain(
        cannot_load(modules, "simpy,optuna,plotly"),
        "A machine that measures needs torch and triton alone; let these modules load without the rest.",
    )


def cannot_load(modules: list[str], blocked: str) -> list[str]:
    """One line for each of ``modules`` that does not load in a process where ``blocked`` packages are absent."""
    command = [sys.executable, "-c", LOADER, blocked, *modules]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).splitlines() if done.returncode else []


def test_every_folder_of_modules_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    holding = {f.parent for folder in FOLDERS for f in (ROOT / folder).rglob("*.py")}
    wanted = {module_name(folder / "__init__.py"): str(folder.relative_to(ROOT)) for folder in holding}
    missing = wanted.items() - {(p, project["package-dir"].get(p)) for p in project["packages"]}
    complain(
        [f"{name} = {folder!r}" for name, folder in sorted(missing)],
        "pyproject.toml, tool.setuptools: packages and package-dir lack these.",
    )


def project_files() -> list[Path]:
    """What git tracks or would track; in a copy without git, everything but hidden and generated folders."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
        files = [ROOT / name for name in listed if name]
    except (OSError, subprocess.CalledProcessError):
        files = [f for f in ROOT.rglob("*") if not any(p.startswith(".") for p in f.relative_to(ROOT).parts)]
    return sorted(f for f in files if f.is_file() and not f.is_symlink())


def test_no_file_is_too_long_to_read_at_once() -> None:
    lengths = {f: len(f.read_bytes().splitlines()) for f in project_files() if f.suffix == ".py"}
    complain(
        [f"{_place(f, n)}: {n} lines" for f, n in lengths.items() if n > MOST_LINES],
        f"A Python file has at most {MOST_LINES} lines; split it by what its parts are about.",
    )


HOSTS = ("pypi" + ".org", "python" + "hosted.org", "registry.npm" + "js.org", "deb.debian" + ".org")
FOREIGN = re.compile("|".join(["/wor" + "k/", r"(?<![\w-])share" + "d/", *map(re.escape, HOSTS)]))


def test_the_project_names_no_machine_and_no_registry() -> None:
    problems: list[str] = []
    for file in project_files():
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(lines, 1):
            if hit := FOREIGN.search(line):
                problems.append(f"{_place(file, number)}: {hit.group()!r}")
    complain(problems, "A path or a host that is true of one machine only; leave it out.")
