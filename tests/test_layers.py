"""Imports point downwards only."""

import ast
from pathlib import Path

import pytest

import functitan

ROOT = Path(functitan.__file__).parent
# The layers from the bottom up; a module imports from its own layer or from a lower one.
LAYERS = [
    ["errors", "_torch"],
    ["tree", "annotations"],
    ["ops"],
    ["random", "remat_policies", "autodiff", "debug"],  # and every other single file beside the packages
    ["sharding"],
    ["compiler"],
    ["runtime"],
    ["nn", "optim"],
    ["data", "checkpoint"],
    ["train"],
    ["recipes"],
    ["cli"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FILES = {path.stem for path in ROOT.glob("*.py")} - {"__init__"}
LEVEL = dict.fromkeys(FILES, LEVEL["autodiff"]) | LEVEL
# What a model and an optimizer may use: they run as plain PyTorch when nothing compiles them.
PLAIN = {"errors", "tree", "annotations", "ops", "random", "remat_policies", "autodiff", "columns"}


def imported_packages(path: Path) -> set[str]:
    """The parts of functitan that a file imports, in any place of it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: write imports in full"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("functitan.")}


def modules() -> list[Path]:
    return [p for p in sorted(ROOT.rglob("*.py")) if p != ROOT / "__init__.py"]


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_downwards(path):
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert own in LEVEL, f"the package {own} has no layer; add it to LAYERS"
    for used in imported_packages(path) & set(LEVEL):
        assert LEVEL[used] <= LEVEL[own], f"{path.relative_to(ROOT)} imports {used}, which is above it"
    if own in ("nn", "optim"):
        assert imported_packages(path) <= PLAIN | {own}, f"{path.relative_to(ROOT)} must stay plain PyTorch"


@pytest.mark.parametrize("path", [p for p in modules() if p.name == "__init__.py"], ids=str)
def test_package_files_only_re_export(path):
    for node in ast.parse(path.read_text()).body:
        plain = isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign)
        assert plain or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)), f"{path}: {node}"
