"""Keys: the description of everything that a kernel's code depends on, and its SHA-256.

The description is text that people can read and compare:

    kernel: lightning_decode
    target: cute_attn.kernels.lightning.decode:LightningDecode
    spec: DecodeSpec
    spec.dtype: torch.bfloat16
    spec.head_dim: 128
    arch: sm_90a
    ...

Two specialisations have the same text only if values and types agree: `True`, `1` and `1.0` are
three different values.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from . import toolchain
from .fingerprint import fingerprint

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_):
        return lambda decorator: decorator


_Class = TypeVar("_Class", bound=type)
_FORMAT = "cute kernel key 2"


@dataclass(frozen=True)
class KernelDef:
    """A kernel that the cache can build.

    Attributes:
        name: shown in logs, tables and errors.
        target: `"package.module:Class"`. The module is imported only to compile; then `k =
            Class(spec)` is compiled for the arguments `k.fake_args()`. The last argument is
            `make_fake_stream(use_tvm_ffi_env_stream=True)`.
        options: further options for `cute.compile`.
        package: the package whose sources are part of the key; by default the first component of
            `target`. Sources of packages outside site-packages are always part of the key.
        sources: further modules whose sources are part of the key: modules that the kernel imports
            by a computed name. A package stands for all modules in it.
    """

    name: str
    target: str
    options: str = ""
    package: str = ""
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        module, separator, attribute = self.target.partition(":")
        if not (self.name and module and separator and attribute):
            raise ValueError(
                f"KernelDef needs a name and a target 'package.module:Class', got "
                f"name={self.name!r}, target={self.target!r}"
            )
        sources: Any = self.sources
        if isinstance(sources, str):
            raise TypeError(f"sources is {sources!r}, must be a tuple of module names")
        object.__setattr__(self, "sources", tuple(self.sources))
        # Hashed once, because every call of an operator looks up a KernelDef.
        values = (self.name, self.target, self.options, self.package, self.sources)
        object.__setattr__(self, "_hash", hash(values))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return]

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def source_package(self) -> str:
        return self.package or self.module.partition(".")[0]


def canonical_text(value: object, where: str) -> str:
    """The unique text of a plain value.

    Raises TypeError, naming `where`, for anything but int, bool, str, float, None, enum members,
    torch.dtype and tuples of them. A tensor's hash is its identity, so a key with a tensor would
    never match.
    """
    kind = type(value)  # not isinstance: numpy.float64 is a float with another repr
    if value is None or kind is bool or kind is int:
        return repr(value)
    if kind is str:
        return json.dumps(value)
    if kind is float:
        if math.isnan(value):  # type: ignore[arg-type]
            raise TypeError(f"{where} is NaN, which equals nothing, so its key would never match")
        return repr(value)
    if kind is tuple:
        items = [canonical_text(v, f"{where}[{i}]") for i, v in enumerate(value)]  # type: ignore[arg-type, var-annotated]
        return "(" + "".join(item + ", " for item in items).rstrip(" ") + ")"
    if isinstance(value, enum.Enum):
        return f"{kind.__qualname__}.{value.name}={canonical_text(value.value, where)}"
    if (kind.__module__, kind.__name__) == ("torch", "dtype"):
        return str(value)
    raise TypeError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}: a specialisation holds only int, "
        "bool, str, float, None, enum members, torch.dtype and tuples of them"
    )


def spec_items(spec: object) -> tuple[tuple[str, str], ...]:
    """The fields of a specialisation, each with its canonical text.

    Raises TypeError if `spec` is not an instance of a frozen dataclass, or holds a value that
    is not plain.
    """
    kind = type(spec)
    if not dataclasses.is_dataclass(kind) or not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise TypeError(f"a specialisation is an instance of a frozen dataclass, not {kind}")
    fields = dataclasses.fields(kind)
    return tuple(
        (f.name, canonical_text(getattr(spec, f.name), f"{kind.__qualname__}.{f.name}"))
        for f in fields
    )


@dataclass_transform(frozen_default=True)
def spec(cls: _Class) -> _Class:
    """Decorator that makes a class a frozen dataclass for use in keys: a specialisation.

    The cache also takes a class with `dataclass(frozen=True)`. This decorator adds:

    - a value that is not plain raises TypeError when the instance is made, not at its first use;
    - the hash is computed once, which makes the look-up of a warm kernel faster;
    - `True`, `1` and `1.0` are not equal, as in the key on disk.

    Args:
        cls: the class to decorate, with annotated fields like a dataclass.
    """
    own_checks = getattr(cls, "__post_init__", None)

    def __post_init__(self: Any) -> None:
        if own_checks is not None:
            own_checks(self)
        identity = spec_items(self)
        object.__setattr__(self, "_identity", identity)
        object.__setattr__(self, "_hash", hash((type(self), identity)))

    def __hash__(self: Any) -> int:
        return self._hash  # type: ignore[no-any-return]

    def __eq__(self: Any, other: Any) -> bool:
        return self is other or (type(other) is type(self) and self._identity == other._identity)

    for method in (__post_init__, __hash__, __eq__):
        setattr(cls, method.__name__, method)
    made: _Class = dataclass(frozen=True, eq=False)(cls)  # type: ignore[assignment]
    return made


def have_one_text(a: Any, b: Any) -> bool:
    """Whether two specialisations have the same class and canonical text."""
    cls = type(a)
    if cls is not type(b):
        return False
    for name in _field_names(cls):  # type: ignore[arg-type]
        x, y = getattr(a, name), getattr(b, name)
        if x is not y and canonical_text(x, name) != canonical_text(y, name):
            return False
    return True


@functools.cache
def _field_names(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


@dataclass(frozen=True)
class KeyDescription:
    """Everything that a kernel's code depends on, field by field.

    Without a compiler, `dsl`, `cuda` and the versions of imported `packages` are None where the
    value is unknown. A description with such a None is *open*: it stands for every key that agrees
    in all other fields.
    """

    kernel: str
    target: str
    spec_class: str
    spec: tuple[tuple[str, str], ...]
    arch: str
    options: str
    dsl: str | None
    cuda: str | None
    tvm_ffi: str
    platform: str
    packages: tuple[tuple[str, str | None], ...]
    sources: tuple[tuple[str, str], ...]

    @property
    def toolchain(self) -> tuple[str | None, ...]:
        """The values of the fields that may be None."""
        return (self.dsl, self.cuda, *(version for _, version in self.packages))

    @property
    def is_open(self) -> bool:
        return None in self.toolchain

    def lines(self) -> dict[str, str]:
        """The fields by name, in the order of the text."""
        return {
            "kernel": self.kernel,
            "target": self.target,
            "spec": self.spec_class,
            **{f"spec.{name}": value for name, value in self.spec},
            "arch": self.arch,
            "options": self.options,
            "dsl": self.dsl or "any",
            "cuda": self.cuda or "any",
            "tvm_ffi": self.tvm_ffi,
            "platform": self.platform,
            **{f"package {name}": version or "any" for name, version in self.packages},
            **{f"source {module}": sha256 for module, sha256 in self.sources},
        }

    @property
    def text(self) -> str:
        """The canonical description."""
        lines = {"key": _FORMAT, **self.lines()}
        return "".join(f"{name}: {value}\n" for name, value in lines.items())

    @property
    def digest(self) -> str:
        """The SHA-256 of the text, in hexadecimal: the name of the entry."""
        # No cached_property: before Python 3.12 its lock may stay locked after a fork.
        if "_digest" not in self.__dict__:
            self.__dict__["_digest"] = hashlib.sha256(self.text.encode()).hexdigest()
        digest: str = self.__dict__["_digest"]
        return digest

    @property
    def specialisation(self) -> str:
        """The specialisation as text, such as `DecodeSpec(dtype=torch.bfloat16, head_dim=128)`."""
        return f"{self.spec_class}({', '.join(f'{name}={value}' for name, value in self.spec)})"

    def opened(self) -> KeyDescription:
        """This description with None for the fields that only a machine with the compiler knows."""
        packages = tuple((name, None) for name, _ in self.packages)
        return dataclasses.replace(self, dsl=None, cuda=None, packages=packages)

    def admits(self, other: KeyDescription) -> bool:
        """Whether `other` agrees with this description in each field that is not None in this
        description."""
        return self.opened() == other.opened() and admits(self.toolchain, other.toolchain)

    def differences(self, other: KeyDescription) -> list[str]:
        """The fields in which `other` differs, each as `"name: here, there in other"`."""
        mine, theirs = self.lines(), other.lines()
        found = []
        for name in {**mine, **theirs}:
            here, there = mine.get(name, "absent"), theirs.get(name, "absent")
            if here != there and "any" not in (here, there):
                found.append(f"{name}: {here} here, {there} there")
        return found

    def to_json(self) -> dict[str, Any]:
        pairs = {name: dict(getattr(self, name)) for name in ("spec", "packages", "sources")}
        return {**dataclasses.asdict(self), **pairs}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> KeyDescription:
        """The inverse of `to_json`.

        Raises KeyError, TypeError or AttributeError for a value that `to_json` does not make.
        """
        fields = {f.name: data[f.name] for f in dataclasses.fields(cls)}
        for name in ("spec", "sources"):
            fields[name] = tuple((str(k), str(v)) for k, v in fields[name].items())
        fields["packages"] = tuple(
            (str(k), v if v is None else str(v)) for k, v in fields["packages"].items()
        )
        return cls(**fields)


def admits(known: tuple[str | None, ...], other: tuple[str | None, ...]) -> bool:
    """Whether `other` agrees with `known` wherever `known` is not None."""
    return all(x is None or x == y for x, y in zip(known, other, strict=True))


def describe(kernel: KernelDef, spec: object, arch: str) -> KeyDescription:
    """The key of a kernel for an architecture such as `"sm_90a"`. Imports no kernel code.

    Args:
        kernel: the kernel.
        spec: the kernel's specialisation.
        arch: such as `"sm_90a"`.

    Raises:
        TypeError: `spec` is not a frozen dataclass of plain values.
        CacheError: the kernel's sources are not found.
    """
    module = type(spec).__module__
    sources, packages = fingerprint(kernel.module, kernel.source_package, kernel.sources, module)
    dsl = toolchain.dsl_version()
    absent = None if dsl is None else "absent"  # without a compiler, packages may be missing
    return KeyDescription(
        kernel=kernel.name,
        target=kernel.target,
        spec_class=type(spec).__qualname__,
        spec=spec_items(spec),
        arch=arch,
        options=toolchain.compile_options(kernel.options),
        dsl=dsl,
        cuda=toolchain.cuda_flavour(),
        tvm_ffi=toolchain.tvm_ffi_abi(),
        platform=toolchain.host_platform(),
        packages=tuple((name, version or absent) for name, version in packages),
        sources=sources,
    )
