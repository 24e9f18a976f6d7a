"""Who may import whom, and how little an import brings in."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"archon": ROOT / "archon", "archon_kernels": ROOT / "kernels" / "archon_kernels", "areal": ROOT / "areal"}
# What the lower packages may import when they are imported, besides the standard library and themselves.
AT_IMPORT = {
    "archon": {"torch", "numpy", "safetensors", "archon_kernels"},
    "archon_kernels": {"torch", "triton"},
}
# What they may not import even inside a function.
NEVER = {"archon": {"areal"}, "archon_kernels": {"archon", "areal", "transformers"}}

# Released together with torch and with pydantic.
TOGETHER = {"triton", "pydantic_core"}

HEAVY = {"pydantic", "omegaconf", "fastapi", "ray", "vllm", "sglang", "transformers", "areal"}


def modules_after(code: str) -> set[str]:
    """Top-level modules that a new interpreter holds after running ``code``, whose output is dropped."""
    script = (
        "import contextlib, io, sys\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        + "".join(f"    {line}\n" for line in code.splitlines())
        + "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def imports_of(path: Path, *, at_import: bool) -> Iterator[str]:
    """Top-level names that a file imports: when it is imported itself, or anywhere in it."""
    todo: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
        elif at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        elif at_import and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo.extend(node.orelse)
            continue
        todo.extend(ast.iter_child_nodes(node))


@pytest.mark.parametrize("package", AT_IMPORT)
def test_arrows_point_one_way(package: str) -> None:
    allowed = AT_IMPORT[package] | {package} | sys.stdlib_module_names
    wrong = []
    for path in sorted(PACKAGES[package].rglob("*.py")):
        name = path.relative_to(ROOT)
        wrong += [f"{name} imports {module}" for module in set(imports_of(path, at_import=True)) - allowed]
        wrong += [
            f"{name} imports {module}" for module in NEVER[package].intersection(imports_of(path, at_import=False))
        ]
    assert not wrong


def test_import_archon_takes_nothing_heavy() -> None:
    assert not modules_after("import archon") & HEAVY


def test_import_kernels_takes_only_torch() -> None:
    modules = modules_after("import archon_kernels")
    assert not modules & (HEAVY | {"archon"})


def test_import_areal_takes_nothing_heavy() -> None:
    """``from areal import Trainer`` is the whole of it; ``import areal`` alone is cheap."""
    assert not modules_after("import areal") & ((HEAVY - {"areal"}) | {"torch"})


@pytest.mark.parametrize("command", ["run_main", "main"])
def test_help_takes_neither_torch_nor_transformers(command: str) -> None:
    code = f"""
sys.argv = ['archon', '--help']
from areal.cli import {command}
try:
    {command}()
except SystemExit as stop:
    assert not stop.code
else:
    raise AssertionError('--help did not exit')
"""
    assert not modules_after(code) & {"torch", "transformers", "numpy", "pydantic", "omegaconf"}


def test_every_import_is_declared() -> None:
    """A library that only comes along with another one today may not come tomorrow."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *(name for extra in project["optional-dependencies"].values() for name in extra)]
    declared = {normal_name(re.split(r"[^\w.-]", text)[0]) for text in asked}
    distributions = packages_distributions()
    undeclared = {
        f"{path.relative_to(ROOT)} imports {module}"
        for folder in PACKAGES.values()
        for path in folder.rglob("*.py")
        for module in set(imports_of(path, at_import=False)) - set(PACKAGES) - TOGETHER - sys.stdlib_module_names
        if not declared.intersection(map(normal_name, distributions.get(module, [module])))
    }
    assert not undeclared


def normal_name(distribution_name: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution_name).lower()


def test_console_scripts_are_installed() -> None:
    scripts = {
        script.name: script.value for script in distribution("archon").entry_points.select(group="console_scripts")
    }
    assert scripts == {"archon-run": "areal.cli:run_main", "archon": "areal.cli:main"}


def test_kernels_is_no_package() -> None:
    """``kernels`` is another project's import name: the install must not provide it."""
    code = (
        "from importlib.util import find_spec\n"
        "spec = find_spec('kernels')\n"
        "print(*(spec.submodule_search_locations or ()) if spec else ())"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd="/", timeout=60)
    assert done.returncode == 0, done.stderr
    assert str(ROOT) not in done.stdout


def test_importing_archon_leaves_torchs_compiler_alone() -> None:
    """It takes a second to load, and only ``Options.compile`` and pipelines need it."""
    script = "import sys, archon; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False"]
