"""Finds a kernel's source files, and their SHA-256, by parsing and not by running.

The search starts from the modules of the kernel and of its specialisation. The search follows every
import into modules of the kernel's package and of packages outside site-packages: at module level,
inside functions and inside conditions, except under `if TYPE_CHECKING`. For a package in
site-packages the key has the installed version; for the compiler the key has other fields.

A package's `__init__` is a source only if something is taken from it. `from package.sub import
name` adds `package/sub/__init__.py` if that file binds `name` (or `*` is imported, or `name` is not
a module), otherwise the module `package.sub.name`. `import package.sub.module` binds `package`,
which gives access to everything, so this import adds every `__init__` on the way. `import
package.sub.module as m` adds no `__init__`.

`import_module` and `__import__` are followed if their argument is a literal. If the name is
computed, as in a package with a lazy `__getattr__`, every string in the file that names a module is
followed. If a dictionary maps the wanted name to a string, only this string is followed.
`KernelDef.sources` declares modules that the search does not find.

So a key changes with the code that a kernel can execute, but not with documentation or other
kernels.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import NamedTuple

from .errors import CacheError
from .locks import no_fork
from .log import warn_once

# The compiler and its own packages: the fields `dsl` and `tvm_ffi` of a key stand for them.
_TOOLCHAIN = frozenset({"cutlass", "tvm_ffi", "cuda"})
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_IMPORTERS = frozenset({"import_module", "__import__"})


class Fingerprint(NamedTuple):
    """The sources and packages that a kernel is built from.

    Attributes:
        sources: modules, with their files' SHA-256.
        packages: packages in site-packages that the sources import, with their distributions'
            versions; None for a package that is not installed.
    """

    sources: tuple[tuple[str, str], ...]
    packages: tuple[tuple[str, str | None], ...]


class _Source:
    """A module's source file: its path and text."""

    def __init__(
        self, module: str, is_package: bool, search: tuple[str, ...], path: str, text: bytes
    ) -> None:
        self.module = module
        self.is_package = is_package
        self.search = search
        self.path = path
        self.text = text
        self._tree: ast.Module | None = None
        self._bound_names: set[str] | None = None

    @property
    def tree(self) -> ast.Module:
        if self._tree is None:
            try:
                with no_fork:  # CPython 3.11 fails where two threads build trees at once
                    self._tree = ast.parse(self.text)
            except SyntaxError as error:
                raise CacheError(f"{self.path} is not valid Python: {error}") from error
        return self._tree

    @property
    def bound_names(self) -> set[str]:
        """The names that the module binds by statements outside functions and classes."""
        if self._bound_names is None:
            self._bound_names = _bound_names(self.tree)
        return self._bound_names

    @property
    def parent(self) -> str:
        """The package that the module is in; for an `__init__`, the package itself."""
        return self.module if self.is_package else self.module.rpartition(".")[0]


class _Modules:
    """Looks up modules without importing them."""

    def __init__(self, package: str) -> None:
        self.package = package
        self._sources: dict[str, _Source | None] = {}
        self._local: dict[str, bool] = {}

    def follows(self, module: str) -> bool:
        """Whether the fingerprint includes a module that another module imports. True in the
        kernel's package, and for other modules outside site-packages. The cache, the standard
        library and the toolchain are left out."""
        if _is_within(module, __package__):
            return False  # the cache itself
        if _is_within(module, self.package):
            return True
        top = module.partition(".")[0]
        if top not in self._local:
            self._local[top] = not _is_ignored(top) and _is_local(_find_top_level(top))
        return self._local[top]

    def source(self, module: str) -> _Source | None:
        """The source of a module, or None if no such module has a Python source."""
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
            # A namespace package has modules but no text; an extension module has neither modules
            # nor text.
            return _Source(module, is_package, search, "", b"") if is_package else None
        try:
            text = Path(spec.origin).read_bytes()
        except OSError:
            return None
        return _Source(module, is_package, search, spec.origin, text)


def _is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _is_ignored(module: str) -> bool:
    """Whether a module does not influence kernels, or is covered by another field of the key."""
    top = module.partition(".")[0]
    ignored = top in sys.stdlib_module_names or top in _TOOLCHAIN or top == "__main__"
    return ignored or _is_within(module, __package__)


def _is_local(spec: ModuleSpec | None) -> bool:
    """Whether a top-level module has sources outside site-packages."""
    if spec is None:
        return False
    paths = [*(spec.submodule_search_locations or ()), *filter(None, [spec.origin])]
    return bool(paths) and not any(_INSTALLED & set(Path(path).parts) for path in paths)


def _find_top_level(module: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError):  # ValueError: a script's __main__ has no spec
        return None


def _find_spec(module: str, search: tuple[str, ...]) -> ModuleSpec | None:
    """importlib.util.find_spec without importing the parent package."""
    try:
        for finder in sys.meta_path:
            spec = finder.find_spec(module, search)
            if spec is not None:
                return spec
    except KeyError:  # a namespace package: Python lists its parts through the parent module
        spec = ModuleSpec(module, None, is_package=True)
        last = module.rpartition(".")[2]
        spec.submodule_search_locations = [f"{directory}/{last}" for directory in search]
        return spec
    return None


def _executed_nodes(tree: ast.AST) -> list[ast.AST]:
    """All nodes except nodes under `if TYPE_CHECKING`, and nodes inside expressions."""
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


class _Imports:
    """The imports of a module: other modules, and names from packages that import lazily."""

    def __init__(self, source: _Source, modules: _Modules) -> None:
        self.source = source
        self.modules = modules
        self.found: set[str] = set()
        self.external: set[str] = set()  # top-level names of packages in site-packages
        for node in _executed_nodes(source.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._object(alias.name, with_parents=alias.asname is None)
            elif isinstance(node, ast.ImportFrom):
                base = _absolute_name(node, source)
                for alias in node.names:
                    self._name(base, alias.name)
        if any(name.encode() in source.text for name in _IMPORTERS):
            self._calls()

    def _counts(self, module: str) -> bool:
        if self.modules.follows(module):
            return True
        if module and not _is_ignored(module):
            self.external.add(module.partition(".")[0])
        return False

    def _object(self, module: str, *, with_parents: bool = False) -> None:
        """Add a module that is imported as an object, which gives access to everything in it."""
        if not self._counts(module):
            return
        parts = module.split(".")
        first = 1 if with_parents else len(parts)
        for name in (".".join(parts[:n]) for n in range(first, len(parts) + 1)):
            self.found.add(name)
            found = self.modules.source(name)
            if found is not None and _is_lazy(found):
                self._lazy(found, None)

    def _name(self, base: str, name: str) -> None:
        """Add the module that `from base import name` imports."""
        submodule = f"{base}.{name}"
        if _is_within(submodule, __package__) or not self._counts(base):
            return
        source = self.modules.source(base)
        if source is None or (not source.is_package and not _is_lazy(source)):
            self.found.add(base)
            return
        is_module = name != "*" and self.modules.source(submodule) is not None
        # "from . import a" inside __init__ binds a, but still imports the module a.
        if is_module and (name not in source.bound_names or base == self.source.module):
            self._object(submodule)
            return
        self.found.add(base)
        if is_module:
            self._object(submodule)
        elif name not in source.bound_names and _is_lazy(source):
            self._lazy(source, None if name == "*" else name)

    def _calls(self) -> None:
        """Add the modules that calls of `import_module` and `__import__` import."""
        computed = False
        lazy = _is_lazy(self.source)
        for call in _import_calls(self.source.tree, skip_getattr=lazy):
            name = call.args[0] if call.args else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                level = _level_of(call)
                relative = name.value.startswith(".") or level > 0
                dots = len(name.value) - len(name.value.lstrip(".")) + level
                module = name.value.lstrip(".")
                node = ast.ImportFrom(module or None, [], dots if relative else 0)
                binds_parents = _called(call) == "__import__" and not relative
                self._object(_absolute_name(node, self.source), with_parents=binds_parents)
            else:
                computed = True
        if computed:
            self._strings(self.source, _strings(self.source.tree))

    def _lazy(self, source: _Source, name: str | None) -> None:
        """Add the modules that a lazy module imports for a name, or for any name if `name` is
        None."""
        mapped = _mapped_strings(source.tree, name) if name else []
        self._strings(source, mapped or _strings(source.tree))

    def _strings(self, source: _Source, strings: Iterable[str]) -> None:
        """Add the modules that `strings` name, for an import by a computed name in `source`."""
        named = set()
        for text in strings:
            if re.fullmatch(r"\.*[^\W\d]\w*(\.[^\W\d]\w*)*", text):
                relative = f"{source.parent}.{text.lstrip('.')}"
                for module in {relative, text} - {source.module, ""}:
                    if self.modules.follows(module):
                        found = self.modules.source(module)
                        named |= {module} if found is not None and found.path else set()
        self.found |= named
        if not named:
            warn_once(
                f"computed import {source.module}",
                "%s imports by a computed name, which keys cannot follow: name the modules in "
                "KernelDef.sources",
                source.module,
            )


def _is_lazy(source: _Source) -> bool:
    """Whether a module imports names lazily."""
    if b"sys.modules[__name__]" in source.text:
        return True
    return b"__getattr__" in source.text and "__getattr__" in source.bound_names


def _import_calls(tree: ast.Module, *, skip_getattr: bool) -> Iterator[ast.Call]:
    for statement in tree.body:
        if skip_getattr and getattr(statement, "name", None) == "__getattr__":
            continue  # followed when a name is requested
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and _called(node) in _IMPORTERS:
                yield node


def _called(call: ast.Call) -> str | None:
    """The name of the called function, without its module."""
    return getattr(call.func, "attr", getattr(call.func, "id", None))


def _level_of(call: ast.Call) -> int:
    """The argument `level` of a call of `__import__`: the number of leading dots."""
    given = [k.value for k in call.keywords if k.arg == "level"] or call.args[4:5]
    value = given[0].value if given and isinstance(given[0], ast.Constant) else 0
    return value if isinstance(value, int) else 0


def _strings(tree: ast.AST) -> list[str]:
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def _mapped_strings(tree: ast.AST, name: str) -> list[str]:
    """Strings to which a module's dictionaries map `name`, and keys that the dictionaries map to a
    list with `name`.
    """
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if key is not None and name in _strings(key):
                    found += _strings(value)
                elif key is not None and isinstance(value, ast.List | ast.Tuple | ast.Set):
                    found += _strings(key) if name in _strings(value) else []
    return found


def _absolute_name(node: ast.ImportFrom, source: _Source) -> str:
    if node.level == 0:
        return node.module or ""
    parts = source.module.split(".")
    # One dot means the module's package; for an __init__, the module itself.
    up = node.level - (1 if source.is_package else 0)
    base = parts[: len(parts) - up] if up else parts
    return ".".join([*base, node.module] if node.module else base)


def _closure(roots: list[str], modules: _Modules) -> tuple[dict[str, _Source], set[str]]:
    """The sources reached from `roots`, and the top-level packages in site-packages that the
    sources import.
    """
    reached: dict[str, _Source] = {}
    external: set[str] = set()
    pending = list(roots)
    while pending:
        name = pending.pop()
        source = modules.source(name)
        if name in reached or source is None or not source.path:
            continue
        reached[name] = source
        imports = _Imports(source, modules)
        pending += imports.found
        external |= imports.external
    return reached, external


def _modules_below(package: str, modules: _Modules) -> list[str]:
    """The module `package`, and all modules in it if it is a package."""
    source = modules.source(package)
    if source is None:
        raise CacheError(
            f"no Python source found for the module {package!r}: without it the cache cannot "
            "tell which entries are current"
        )
    names = [package]
    for info in pkgutil.iter_modules(source.search):
        names += _modules_below(f"{package}.{info.name}", modules)
    return names


def installed_version(package: str) -> str | None:
    """The names and versions of a package's distributions; None for a package that is not
    installed."""
    from importlib import metadata

    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        pass
    names = sorted(set(_distributions().get(package, ())))
    return ", ".join(f"{name} {metadata.version(name)}" for name in names) or None


@functools.cache
def _distributions() -> dict[str, list[str]]:
    from importlib import metadata

    return dict(metadata.packages_distributions())


def read_fingerprint(
    module: str, package: str, declared: tuple[str, ...] = (), spec_module: str = ""
) -> Fingerprint:
    """Find the sources and packages of a kernel.

    Args:
        module: the kernel's module.
        package: package whose sources are followed even in site-packages.
        declared: further modules; a package stands for all modules in it.
        spec_module: the specialisation's module.

    Raises CacheError if `module` or a declared module has no source.
    """
    modules = _Modules(package)
    start = modules.source(module)
    if start is None or not start.path:
        raise CacheError(
            f"no Python source found for the kernel module {module!r}: without it the cache cannot "
            "tell which entries are current"
        )
    roots = [module, *(name for item in declared for name in _modules_below(item, modules))]
    if modules.follows(spec_module):
        roots.append(spec_module)
    reached, external = _closure(roots, modules)
    if spec_module and not modules.follows(spec_module) and not _is_ignored(spec_module):
        external.add(spec_module.partition(".")[0])
    return Fingerprint(
        tuple(
            (name, hashlib.sha256(source.text).hexdigest())
            for name, source in sorted(reached.items())
        ),
        tuple((name, installed_version(name)) for name in sorted(external)),
    )


@functools.cache
def fingerprint(
    module: str, package: str, declared: tuple[str, ...] = (), spec_module: str = ""
) -> Fingerprint:
    """The result of `read_fingerprint`, computed once per process, because a process loads modules
    once."""
    return read_fingerprint(module, package, declared, spec_module)
