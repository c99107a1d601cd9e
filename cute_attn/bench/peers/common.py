"""A `Request` is one call of a peer's front end. A `Captured` holds the calls of compiled functions
that the front end would then make. `Memory` provides their buffers. This module imports neither
peer nor compiler.

A directory of captures holds

    functions/<digest>/k.o, kernel.ptx   a compiled function, shared by the captures that call it
    captures/<digest>.json               one capture: buffers and calls
    lock                                 held by the process that compiles

A capture's digest covers the request, the versions of the packages that it depends on, and the
sources of this package.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent

FUNCTION_NAME = "k"  # every exported function has the symbol `__tvm_ffi_k`
GUARD = 256  # bytes before and after every buffer, and the alignment of its start
POISON = 0xFF  # every byte; reads as NaN in floating-point formats, -1 in integers

# The distribution that a peer needs, and the module by which the distribution is found.
DISTRIBUTIONS = {
    "flash_attention_4": (("flash-attn-4", "flash_attn"), ("quack-kernels", "quack")),
    "quack_kernels": (("quack-kernels", "quack"),),
}
COMPILER = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "torch")
LINES = "CUTE_DSL_LINEINFO"  # machine code that names lines of PTX; needs a directory of its own

Plain = None | bool | int | float | str | tuple["Plain", ...]


class CaptureError(Exception):
    """A front end refused a request, or its kernel did not compile."""


# -- requests -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """One call of a front end.

    Attributes:
        peer: the module of this package that knows the front end.
        function: the function of the module, such as "forward".
        arch: such as "sm_100a".
        num_sms: the number of SMs that the front end is told. The number sets the grid of
            persistent kernels, and some kernels have the number as a compile-time constant.
        options: the function's options, sorted by name.
    """

    peer: str
    function: str
    arch: str
    num_sms: int
    options: tuple[tuple[str, Plain], ...]

    @property
    def name(self) -> str:
        """A name for people and test ids: the options that differ from the function's defaults."""
        module = importlib.import_module(f".{self.peer}", __package__)
        parameters = inspect.signature(getattr(module, self.function)).parameters
        parts = [self.function, self.arch.replace("_", "")]
        for key, value in self.options:
            if value != parameters[key].default:
                parts.append(key if value is True else f"{key}={value}".replace(" ", ""))
        if self.num_sms != _num_sms(self.arch):
            parts.append(f"num_sms={self.num_sms}")
        return "-".join(parts)

    def capture(self, directory: str | os.PathLike[str]) -> Captured:
        """Read the capture from `directory`, or compile the capture there first; see
        `capture_all`."""
        return capture_all(directory, [self])[0]

    @property
    def digest(self) -> str:
        versions = [
            (name, importlib.metadata.version(name))
            for name in (*(d for d, _ in DISTRIBUTIONS[self.peer]), *COMPILER)
        ]
        text = repr((self, versions, _own_sources()))
        return hashlib.sha256(text.encode()).hexdigest()


def request(
    peer: str, function: str, arch: str, num_sms: int | None, options: Mapping[str, Plain]
) -> Request:
    """A request with the SM count of the usual GPU of `arch` where none is given."""
    return Request(peer, function, arch, num_sms or _num_sms(arch), tuple(sorted(options.items())))


def _num_sms(arch: str) -> int:
    return {"sm_90a": 132, "sm_100a": 148, "sm_103a": 148, "sm_120a": 170}.get(arch, 108)


def offsets(lengths: Sequence[int]) -> tuple[int, ...]:
    """The start of each sequence of a batch, and the end of the last sequence."""
    return tuple(itertools.accumulate(lengths, initial=0))


def missing(peer: str) -> str | None:
    """The reason why a peer cannot be captured here, for skipping a test; None if the peer can be
    captured."""
    for distribution, module in (*DISTRIBUTIONS[peer], *((name, None) for name in COMPILER)):
        if not _is_installed(distribution, module):
            return f"needs {distribution}, which is not installed"
    return None


def _is_installed(distribution: str, module: str | None) -> bool:
    try:
        importlib.metadata.version(distribution)
        return module is None or importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


@cache
def _own_sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(HERE.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


# -- what was captured ----------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorArgument:
    """A view of a buffer. Shape, stride and offset count elements of `dtype`, the name of a torch
    dtype."""

    buffer: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: str


@dataclass(frozen=True)
class PointerArgument:
    """The address of a byte of a buffer, passed as an integer."""

    buffer: str
    offset: int


Argument = (
    TensorArgument | PointerArgument | None | bool | int | float | str | tuple["Argument", ...]
)


@dataclass(frozen=True)
class Buffer:
    """Memory that the calls of a capture share.

    Attributes:
        name: the front end's name of the buffer, such as "dq_accum".
        role: "input" (the caller fills it), "output" (the caller reads it), or "scratch".
        view: the tensor as its allocator sees it.
        size: size in bytes.
        fill: the value that the front end gives every element before the first call; None is no
            value.
        values: the content of an input whose content goes with the request, such as sequence
            offsets.
        bounds: bounds of random integers for an input, [low, high).
    """

    name: str
    role: str
    view: TensorArgument
    size: int
    fill: float | None = None
    values: Plain = None
    bounds: tuple[int, int] | None = None


@dataclass(frozen=True)
class CompiledFunction:
    """A compiled host function and the kernels in it.

    Attributes:
        object_file: exports `__tvm_ffi_k`.
        entries: names of the kernels in the PTX, in the order of the PTX.
    """

    object_file: Path
    ptx_file: Path
    entries: tuple[str, ...]

    @property
    def ptx(self) -> str:
        return self.ptx_file.read_text()


@dataclass(frozen=True)
class Call:
    """One call of a compiled function: positional arguments, and the function's names of the
    arguments."""

    function: CompiledFunction
    parameters: tuple[str, ...]
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class Captured:
    """The calls that a front end would make on a GPU.

    Attributes:
        host_operations: operations that torch itself would run between the calls, and that no call
            here runs. Empty means that the calls are complete.
    """

    request: Request
    calls: tuple[Call, ...]
    buffers: Mapping[str, Buffer]
    host_operations: tuple[str, ...]

    @property
    def inputs(self) -> list[Buffer]:
        return [b for b in self.buffers.values() if b.role == "input"]

    @property
    def outputs(self) -> list[Buffer]:
        return [b for b in self.buffers.values() if b.role == "output"]

    def random_inputs(self, seed: int = 0, scale: float = 1.0) -> dict[str, torch.Tensor]:
        """Inputs whose content does not go with the request: normal random numbers, or integers in
        bounds."""
        generator = torch.Generator().manual_seed(seed)
        return {b.name: _random(b, generator, scale) for b in self.inputs if b.values is None}

    def materialise(self, overrides: Mapping[str, torch.Tensor | float] | None = None) -> Memory:
        """Memory on the CPU for the calls; see `Memory`."""
        return Memory(self, overrides or {})


def _random(buffer: Buffer, generator: torch.Generator, scale: float) -> torch.Tensor:
    shape, dtype = buffer.view.shape, getattr(torch, buffer.view.dtype)
    if buffer.bounds is not None:
        return torch.randint(*buffer.bounds, shape, generator=generator).to(dtype)
    if buffer.view.dtype == "float8_e8m0fnu":  # a power of two: 2 ** (byte - 127)
        return torch.randint(125, 130, shape, generator=generator).to(torch.uint8).view(dtype)
    if buffer.view.dtype == "float4_e2m1fn_x2":
        return torch.randint(0, 256, shape, generator=generator).to(torch.uint8).view(dtype)
    if not dtype.is_floating_point:
        raise ValueError(f"no random content is known for {buffer.name}, of {dtype}")
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


class Memory:
    """The buffers of a capture, as CPU tensors.

    Each buffer starts as NaNs (every byte is 0xFF), unless the front end fills the buffer, or the
    content goes with the request, or the caller overrides the content. A caller overrides by a
    number, or by a tensor of the same shape and dtype, which is copied. Buffers are aligned like
    GPU buffers, and lie between guard bytes.

    Attributes:
        tensors: each buffer by name, as its allocator sees the buffer.

    Raises:
        KeyError: an input has no content, or an override names a missing buffer.
        ValueError: an override of another shape or dtype.
    """

    def __init__(self, captured: Captured, overrides: Mapping[str, torch.Tensor | float]):
        unknown = overrides.keys() - captured.buffers.keys()
        if unknown:
            raise KeyError(f"no buffers {sorted(unknown)}; there are {sorted(captured.buffers)}")
        self._whole: dict[str, torch.Tensor] = {}
        self._bytes: dict[str, torch.Tensor] = {}
        self._views: dict[str, TensorArgument] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        for name, buffer in captured.buffers.items():
            whole = torch.full((buffer.size + 3 * GUARD,), POISON, dtype=torch.uint8)
            start = GUARD + -whole.data_ptr() % GUARD
            self._whole[name] = whole
            self._bytes[name] = whole[start : start + buffer.size]
            self._views[name] = buffer.view
            tensor = self.tensors[name] = self.view(buffer.view)
            if name in overrides:
                _override(name, tensor, overrides[name])
            elif buffer.values is not None:
                tensor.copy_(torch.tensor(buffer.values, dtype=tensor.dtype))
            elif buffer.fill is not None:
                tensor.fill_(buffer.fill)
            elif buffer.role == "input":
                raise KeyError(f"nothing to put into the input {name}")

    def view(self, argument: TensorArgument) -> torch.Tensor:
        """The tensor that an argument describes."""
        memory = self._bytes[argument.buffer].view(getattr(torch, argument.dtype))
        start = memory.storage_offset() + argument.offset
        return memory.as_strided(argument.shape, argument.stride, start)

    def address(self, buffer: str) -> tuple[int, int]:
        """Where a buffer starts, and its size in bytes."""
        return self._bytes[buffer].data_ptr(), self._bytes[buffer].numel()

    def arguments(
        self, call: Call, wrap: Callable[[torch.Tensor], Any] = lambda tensor: tensor
    ) -> list[Any]:
        """The positional arguments of a call, with `wrap(tensor)` for each tensor."""

        def value(argument: Argument) -> Any:
            if isinstance(argument, TensorArgument):
                return wrap(self.view(argument))
            if isinstance(argument, PointerArgument):
                return self._bytes[argument.buffer].data_ptr() + argument.offset
            if isinstance(argument, tuple):
                return tuple(map(value, argument))
            return argument

        return [value(argument) for argument in call.arguments]

    def move(self, device: str) -> None:
        """Move all buffers, unchanged, to a device."""
        for name, old in self._bytes.items():
            whole = torch.full_like(self._whole[name], POISON, device=device)
            start = GUARD + -whole.data_ptr() % GUARD
            self._whole[name] = whole
            self._bytes[name] = whole[start : start + old.numel()]
            self._bytes[name].copy_(old)
            self.tensors[name] = self.view(self._views[name])

    def overwritten_guards(self) -> list[str]:
        """Names of the buffers with a changed byte just before or after them."""
        return [
            name
            for name, whole in self._whole.items()
            if bool((whole != POISON).sum() != (self._bytes[name] != POISON).sum())
        ]


def _override(name: str, tensor: torch.Tensor, value: torch.Tensor | float) -> None:
    if not isinstance(value, torch.Tensor):
        tensor.fill_(value)
        return
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise ValueError(
            f"{name} is {tuple(tensor.shape)} of {tensor.dtype}, "
            f"not {tuple(value.shape)} of {value.dtype}"
        )
    if tensor.dtype.itemsize == 1:  # torch copies no elements of its smallest types
        tensor, value = tensor.view(torch.uint8), value.view(torch.uint8)
    tensor.copy_(value)


# -- capturing ------------------------------------------------------------------------------------


def capture_all(directory: str | os.PathLike[str], requests: Iterable[Request]) -> list[Captured]:
    """Read captures from `directory`; compile missing captures first.

    Requests of one architecture and SM count are compiled in one process, which takes about 4 s to
    start. Within a process, requests that differ only in shapes often share kernels.

    Raises:
        CaptureError: some requests failed. The message names the failed requests; all other
            captures are in the directory.
    """
    root, requests = Path(directory), list(requests)
    (root / "captures").mkdir(parents=True, exist_ok=True)
    paths = {r: root / "captures" / f"{r.digest}.json" for r in requests}
    if not all(path.exists() for path in paths.values()):
        with _locked(root / "lock"):
            groups: dict[tuple[str, int], dict[str, Request]] = {}
            for r, path in paths.items():
                if not path.exists():
                    groups.setdefault((r.arch, r.num_sms), {})[path.stem] = r
            errors = [
                e for (arch, sms), group in groups.items() for e in _run(root, arch, sms, group)
            ]
        if errors:
            raise CaptureError("\n\n".join(errors))
    return [read(root, paths[r], r) for r in requests]


def _run(root: Path, arch: str, num_sms: int, group: Mapping[str, Request]) -> list[str]:
    """Compile requests in a separate process; return the errors of that process."""
    with tempfile.TemporaryDirectory(prefix="peers-") as scratch:
        jobs, outcome = Path(scratch, "jobs"), Path(scratch, "errors.json")
        jobs.write_text(repr([(d, r.peer, r.function, r.options) for d, r in group.items()]))
        result = subprocess.run(
            [
                sys.executable,
                "-m",
                f"{__package__}.worker",
                str(root.absolute()),
                str(jobs),
                str(outcome),
            ],
            cwd=scratch,  # the compiler leaves files where it runs
            env=_environment(arch, num_sms),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if not outcome.exists():
            return [f"the process that captures failed:\n{result.stderr[-4000:]}"]
        return [
            f"{group[digest].name}:\n{e}" for digest, e in json.loads(outcome.read_text()).items()
        ]


def _environment(arch: str, num_sms: int) -> dict[str, str]:
    """The environment of a capturing process, in which no variable of the user changes the compiled
    kernels, except `LINES`."""
    ours = ("CUTE_DSL_", "FLASH_ATTENTION_", "FA_", "QUACK_")
    kept = {n: v for n, v in os.environ.items() if not n.startswith(ours) or n == LINES}
    plain = arch.rstrip("af")
    return kept | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONWARNINGS": "ignore",
        "CUDA_VISIBLE_DEVICES": "",
        "CUTE_DSL_ARCH": arch,
        "FLASH_ATTENTION_ARCH": plain,
        "FLASH_ATTENTION_NUM_SMS": str(num_sms),
        "QUACK_ARCH": plain,
        "QUACK_CACHE_ENABLED": "0",
    }


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_atomically(path: Path, text: str) -> None:
    """Replace a file, so that a reader sees either the old file or the new file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


# -- JSON -----------------------------------------------------------------------------------------


def encode(argument: Argument) -> Any:
    """An argument as JSON; `decode` is its inverse."""
    if isinstance(argument, TensorArgument):
        return {"tensor": vars(argument)}
    if isinstance(argument, PointerArgument):
        return {"pointer": vars(argument)}
    if isinstance(argument, tuple):
        return [encode(a) for a in argument]
    return argument


def decode(value: Any) -> Argument:
    if isinstance(value, list):
        return tuple(map(decode, value))
    if isinstance(value, dict) and "tensor" in value:
        fields = value["tensor"]
        return TensorArgument(
            **fields | {"shape": tuple(fields["shape"]), "stride": tuple(fields["stride"])}
        )
    if isinstance(value, dict):
        return PointerArgument(**value["pointer"])
    plain: Argument = value
    return plain


def read(root: Path, path: Path, r: Request) -> Captured:
    stored = json.loads(path.read_text())

    def function(digest: str) -> CompiledFunction:
        place = root / "functions" / digest
        ptx_file = place / "kernel.ptx"
        return CompiledFunction(place / "k.o", ptx_file, entries(ptx_file.read_text()))

    functions = {digest: function(digest) for digest in {c["function"] for c in stored["calls"]}}
    return Captured(
        request=r,
        calls=tuple(
            Call(
                functions[c["function"]],
                tuple(c["parameters"]),
                tuple(map(decode, c["arguments"])),
            )
            for c in stored["calls"]
        ),
        buffers={
            b["name"]: Buffer(
                **b
                | {
                    "view": decode(b["view"]),
                    "values": decode(b["values"]),
                    "bounds": tuple(b["bounds"]) if b["bounds"] else None,
                }
            )
            for b in stored["buffers"]
        },
        host_operations=tuple(stored["host_operations"]),
    )


def entries(ptx: str) -> tuple[str, ...]:
    """Names of the kernels in a PTX text."""
    return tuple(re.findall(r"^\s*\.visible\s+\.entry\s+([\w$]+)", ptx, re.MULTILINE))
