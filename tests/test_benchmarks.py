"""What one benchmark uses of another is there: most of them are too long to run in the tests."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
FILES = {path.stem: ast.parse(path.read_text("utf-8")) for path in FOLDER.glob("*.py")}


def names(tree):
    """What a module defines at its top, also under conditions."""
    found, left = set(), list(tree.body)
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)  # and nothing of what is inside
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        else:
            left += ast.iter_child_nodes(node)
    return found


def used(tree):
    """Pairs of a module beside this one, and a name that is used of it."""
    modules, shadowed = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in FILES:
                    modules[alias.asname or alias.name] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module in FILES:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            shadowed.add(node.id)
        elif isinstance(node, ast.arg):
            shadowed.add(node.arg)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            if module is not None and node.value.id not in shadowed:
                yield module, node.attr


@pytest.mark.parametrize("file", sorted(FILES))
def test_names_of_other_files_are_there(file):
    missing = [f"{m}.{name}" for m, name in used(FILES[file]) if name not in names(FILES[m])]
    assert not missing


def test_many_names_are_looked_at():
    assert sum(len(list(used(tree))) for tree in FILES.values()) > 100
