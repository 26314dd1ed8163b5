"""Keep the pages of docs/proofs and the functions that rest on them together.

    python tools/proofs.py                  # list pages whose functions have changed; exit code 1
    python tools/proofs.py --review PAGE    # the page was read again: write the new hashes

A page names its functions in its front matter, each with a hash of its source: the syntax tree
without docstrings, comments and layout. When such a function changes, the page has to be read again
before the hash may be written anew. A name may also be that of a class or of a constant.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "proofs"
SOURCE = ROOT / "src"
_LINE = re.compile(r"^  (?P<name>[\w.]+): (?P<hash>[0-9a-f]{16}|new)$")
# Fields of a syntax tree that say nothing, or that not every supported Python has.
_IGNORED = ("ctx", "kind", "type_comment", "type_params")


def functions(page: Path) -> dict[str, str]:
    """The names of a page's front matter, with the hashes that were reviewed."""
    text = page.read_text(encoding="utf-8")
    found = re.match(r"---\nfunctions:\n(.*?)---\n", text, re.DOTALL)
    if found is None:
        return {}
    named: dict[str, str] = {}
    for line in found[1].splitlines():
        entry = _LINE.match(line)
        if entry is None:
            raise ValueError(
                f"{page.name}: a line of the front matter must be '  NAME: HASH': {line}"
            )
        named[entry["name"]] = entry["hash"]
    return named


def digest(name: str) -> str:
    """16 hex digits of what a dotted name stands for in the source."""
    return hashlib.sha256(canonical(node_of(name)).encode()).hexdigest()[:16]


def node_of(name: str) -> ast.AST:
    """The definition of a dotted name: module, then perhaps a class, then a name in it."""
    parts = name.split(".")
    for split in range(len(parts) - 1, 0, -1):
        path = SOURCE.joinpath(*parts[:split]).with_suffix(".py")
        if path.is_file():
            node: ast.AST = ast.parse(path.read_text(encoding="utf-8"))
            for part in parts[split:]:
                node = _member(node, part, name)
            return node
    raise ValueError(f"{name} must be in a module of the package, got none of that name")


def _member(node: ast.AST, part: str, name: str) -> ast.AST:
    for child in getattr(node, "body", []):
        if getattr(child, "name", None) == part:
            return child
        targets = getattr(child, "targets", [getattr(child, "target", None)])
        if any(each.id == part for each in _names(targets)):
            return child
    raise ValueError(f"{name} must be defined in its module; {part} is not")


def _names(targets: list[ast.expr | None]) -> Iterator[ast.Name]:
    for target in targets:
        if isinstance(target, ast.Name):
            yield target
        elif isinstance(target, ast.Tuple):
            yield from _names(list(target.elts))


def canonical(node: object) -> str:
    """A syntax tree as text, the same for every layout and every supported Python."""
    if isinstance(node, list):
        return "[" + ",".join(canonical(each) for each in node) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    parts: list[str] = []
    for field, value in ast.iter_fields(node):
        if field == "body" and isinstance(value, list) and _is_docstring(node, value):
            value = value[1:]
        if field not in _IGNORED and value is not None and value != []:
            parts.append(f"{field}={canonical(value)}")
    return f"{type(node).__name__}({','.join(parts)})"


def _is_docstring(node: ast.AST, body: list[ast.stmt]) -> bool:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    first = body[0] if body else None
    return (
        isinstance(node, kinds)
        and isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    )


def stale(page: Path) -> list[str]:
    """The functions of a page that are not as they were when it was reviewed."""
    return [name for name, known in functions(page).items() if digest(name) != known]


def review(page: Path) -> list[str]:
    """Write the hashes of all functions of a page; returns those that had changed."""
    changed = stale(page)
    text = page.read_text(encoding="utf-8")
    for name in changed:
        text = re.sub(rf"^  {re.escape(name)}: \w+$", f"  {name}: {digest(name)}", text, flags=re.M)
    page.write_text(text, encoding="utf-8")
    return changed


def main(words: list[str] | None = None) -> int:
    """List or review, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--review", nargs="+", type=Path, metavar="PAGE")
    given = parser.parse_args(words)
    if given.review:
        for page in given.review:
            print(f"{page.name}: {', '.join(review(page)) or 'nothing had changed'}")
        return 0
    found = {page: stale(page) for page in sorted(PAGES.glob("*.md"))}
    for page, names in found.items():
        if names:
            print(
                f"{page.relative_to(ROOT)}: read it again for {', '.join(names)}, then --review it"
            )
    return 1 if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
