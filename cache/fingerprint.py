"""Which sources a kernel is built from, and their SHA-256: found by reading, not by running.

Starting from the kernel's module, every import of a module of the same package is followed:
at module level, inside functions and inside conditions, except under `if TYPE_CHECKING`.
A package's `__init__` counts only where something is taken from it: `from package.sub import
name` counts `package/sub/__init__.py` if that file binds `name` (or `*` is imported, or
`name` is no module), otherwise the module `package.sub.name`. `import package.sub.module`
binds `package`, through which all is reachable, so it counts every `__init__` on the way;
`import package.sub.module as m` does not. Imports by a computed name cannot be seen.

So a key changes with what a kernel can execute, and not with documentation or another kernel.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import NamedTuple

from .errors import CacheError


class _Source(NamedTuple):
    """One module's file: where it is, and what it says."""

    module: str
    is_package: bool
    search: tuple[str, ...]
    path: str
    text: bytes


class _Package:
    """The modules of one package, looked up without importing any of them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._sources: dict[str, _Source | None] = {}

    def contains(self, module: str) -> bool:
        return module == self.name or module.startswith(self.name + ".")

    def source(self, module: str) -> _Source | None:
        """The source of a module, or None if there is no such module with a Python source."""
        if module not in self._sources:
            self._sources[module] = self._read(module)
        return self._sources[module]

    def _read(self, module: str) -> _Source | None:
        parent, _, _ = module.rpartition(".")
        if parent:
            parent_source = self.source(parent)
            spec = _find_spec(module, parent_source.search) if parent_source else None
        else:
            spec = _find_top_level(module)
        if spec is None:
            return None
        search = tuple(spec.submodule_search_locations or ())
        is_package = spec.submodule_search_locations is not None
        if spec.origin is None or not spec.origin.endswith(".py"):
            # A namespace package has modules but no text; an extension module has neither.
            return _Source(module, is_package, search, "", b"") if is_package else None
        try:
            text = Path(spec.origin).read_bytes()
        except OSError:
            return None
        return _Source(module, is_package, search, spec.origin, text)


def _find_top_level(module: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError):  # ValueError: __main__ run as a script has no spec
        return None


def _find_spec(module: str, search: tuple[str, ...]) -> ModuleSpec | None:
    """importlib.util.find_spec, except that it does not import the parent package."""
    try:
        for finder in sys.meta_path:
            spec = finder.find_spec(module, search)
            if spec is not None:
                return spec
    except KeyError:  # a namespace package: to list its parts, Python looks for the parent module
        spec = ModuleSpec(module, None, is_package=True)
        last = module.rpartition(".")[2]
        spec.submodule_search_locations = [f"{directory}/{last}" for directory in search]
        return spec
    return None


def _executed_nodes(tree: ast.AST) -> list[ast.AST]:
    """All nodes but those that only type checkers see."""
    nodes: list[ast.AST] = []
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        nodes.append(node)
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            pending.extend(node.orelse)
        elif not isinstance(node, ast.expr):  # an expression holds no import
            pending.extend(ast.iter_child_nodes(node))
    return nodes


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _bound_names(tree: ast.Module) -> set[str]:
    """The names that a module binds by statements outside functions and classes."""
    names: set[str] = set()
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        else:
            pending.extend(ast.iter_child_nodes(node))
    return names


def _imported_modules(source: _Source, tree: ast.Module, package: _Package) -> set[str]:
    """The modules of `package` that `source` takes something from."""
    found: set[str] = set()
    for node in _executed_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if not package.contains(alias.name):
                    continue
                found.add(alias.name)
                if alias.asname is None:
                    parts = alias.name.split(".")
                    found.update(".".join(parts[:n]) for n in range(1, len(parts)))
        elif isinstance(node, ast.ImportFrom):
            base = _absolute_name(node, source)
            if not package.contains(base):
                continue
            base_source = package.source(base)
            if base_source is None or not base_source.is_package:
                found.add(base)
                continue
            bound = _bound_names(ast.parse(base_source.text))
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                is_module = alias.name != "*" and package.source(submodule) is not None
                # "from . import a" inside __init__ binds a, and the module a is meant all the same.
                if is_module and (alias.name not in bound or base == source.module):
                    found.add(submodule)
                else:
                    found.add(base)
                    if is_module:
                        found.add(submodule)
    return found


def _absolute_name(node: ast.ImportFrom, source: _Source) -> str:
    if node.level == 0:
        return node.module or ""
    parts = source.module.split(".")
    # One dot is the package that the module is in, which for an __init__ is the module itself.
    up = node.level - (1 if source.is_package else 0)
    base = parts[: len(parts) - up] if up else parts
    return ".".join([*base, node.module] if node.module else base)


def _closure(module: str, package: _Package) -> dict[str, _Source]:
    start = package.source(module)
    if start is None or not start.path:
        raise CacheError(
            f"no Python source found for the kernel module {module!r}: without it the cache cannot "
            "tell which entries are current"
        )
    reached = {module: start}
    pending = [start]
    while pending:
        source = pending.pop()
        try:
            tree = ast.parse(source.text)
        except SyntaxError as error:
            raise CacheError(f"{source.path} is not valid Python: {error}") from error
        for name in _imported_modules(source, tree, package):
            imported = package.source(name)
            if imported is not None and imported.path and name not in reached:
                reached[name] = imported
                pending.append(imported)
    return reached


def read_source_digests(module: str, package: str) -> tuple[tuple[str, str], ...]:
    """The modules that `module` is built from within `package`, with their files' SHA-256."""
    return tuple(
        (name, hashlib.sha256(source.text).hexdigest())
        for name, source in sorted(_closure(module, _Package(package)).items())
    )


@functools.cache
def source_digests(module: str, package: str) -> tuple[tuple[str, str], ...]:
    """`read_source_digests`, read once per process, as the modules themselves are."""
    return read_source_digests(module, package)
