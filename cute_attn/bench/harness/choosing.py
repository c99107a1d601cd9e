"""Options that choose some of a benchmark's cases, such as --only."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

Filter = Mapping[str, object]
AnyCase = TypeVar("AnyCase")
OPTIONS = ("only", "passes")  # whatever the benchmark chooses by


def is_part(args: argparse.Namespace) -> bool:
    """Whether the options leave out cases that a run without options measures."""
    return any(getattr(args, x, None) != args.default_of(x) for x in OPTIONS)


def add_only(parser: argparse.ArgumentParser, known: Mapping[str, str], example: str) -> None:
    """Adds --only; `known` are the fields of a case by their names on the command line."""
    parser.add_argument(
        "--only",
        type=partial(_filter, known),
        nargs="+",
        metavar="NAME=VALUE,...",
        help=f"the cases that fit one of these, such as {example} (names: {', '.join(known)})",
    )


def _filter(known: Mapping[str, str], text: str) -> Filter:
    """ "H=64,T=8192" -> {"heads": 64, "tokens": 8192}"""
    found: dict[str, object] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if name not in known or not equals:
            raise argparse.ArgumentTypeError(
                f"{part!r} is not NAME=VALUE with a name of {', '.join(known)}"
            )
        found[known[name]] = int(value) if value.isdigit() else value
    return found


def chosen(
    cases: Sequence[AnyCase],
    only: Sequence[Filter] | None,
    value_of: Callable[[AnyCase, str], Any] = getattr,
) -> list[AnyCase]:
    """The cases that pass one of the filters. A case without a field passes no filter on the
    field."""
    if not only:
        return list(cases)
    return [
        case
        for case in cases
        if any(all(value_of(case, k) == v for k, v in one.items()) for one in only)
    ]
