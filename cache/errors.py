"""Exceptions of the cache. Every message names the key, and the path if known."""

from __future__ import annotations


class CacheError(RuntimeError):
    """The cache cannot do what a caller asked for; base class of the other exceptions."""


class CompileError(CacheError):
    """A kernel does not compile, or no compiler is installed."""


class FrozenCacheMiss(CacheError):
    """A kernel would have to be compiled after `freeze`."""


class DamagedEntry(CacheError):
    """The files of an entry differ from the published files."""


class RefusedEntry(CacheError):
    """A directory or file may have been written by another user.

    Attributes:
        fact: the directory or file, with its owner and mode, without advice.
    """

    def __init__(self, fact: str, advice: str = "") -> None:
        self.fact = fact
        super().__init__(f"{fact}: {advice}" if advice else fact)


class RefusedLibrary(CacheError):
    """The compiler's runtime library may have been written by another user."""
