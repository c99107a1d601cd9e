"""What the cache raises. Every message names the key, and the path if there is one."""

from __future__ import annotations


class CacheError(RuntimeError):
    """The cache cannot do what was asked of it."""


class CompileError(CacheError):
    """A kernel does not compile, or there is no compiler to compile it with."""


class FrozenCacheMiss(CacheError):
    """A kernel would have to be compiled after `freeze`."""


class DamagedEntry(CacheError):
    """The files of an entry are not what was published."""


class RefusedEntry(CacheError):
    """A directory or file could have been written by somebody else."""
