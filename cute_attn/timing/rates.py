"""A GPU's rates and latencies, as `bench rates` measured them, or as others published them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPORTS = Path(__file__).parents[2] / "docs" / "benchmarks"  # in a checkout
PUBLISHED = Path(__file__).parent / "published"


class RatesError(ValueError):
    """There are no rates of the GPU, or a rate is missing."""


@dataclass(frozen=True)
class Rates:
    """Rates by (what, how), in clocks unless the unit says otherwise.

    Attributes:
        gpu: the GPU's name.
        sms: its number of SMs.
        values: (part, what, how, unit) -> value.
        otherwise: the measured rates of another GPU, which stand in for what nobody has published;
            None if all rates were measured.
        sources: where each published rate comes from.
    """

    gpu: str
    sms: int
    values: dict[tuple[str, str, str, str], float] = field(repr=False)
    otherwise: Rates | None = field(default=None, repr=False)
    sources: dict[tuple[str, str, str, str], str] = field(default_factory=dict, repr=False)

    def value(self, part: str, what: str, how: str, unit: str = "clocks") -> float:
        """A measured value.

        Raises:
            RatesError: it was not measured.
        """
        found = self.values.get((part, what, how, unit))
        if found is None:
            raise RatesError(f"{self.gpu} has no rate of {part}, {what}, {how}, in {unit}")
        return found

    def all_of(self, part: str, what: str) -> dict[tuple[str, str], float]:
        """(how, unit) -> value of all measurements of a kind."""
        return {(h, u): v for (p, w, h, u), v in self.values.items() if (p, w) == (part, what)}


def load_rates(gpu: str = "h100", directory: Path | None = None) -> Rates:
    """The rates of a GPU, by the name of its folder in docs/benchmarks, or of its file of published
    rates.

    Raises:
        RatesError: `bench rates` has not run on this GPU.
    """
    path = (directory or REPORTS) / gpu / "rates.json"
    published = PUBLISHED / f"{gpu}.json"
    if directory is None and published.is_file() and not path.is_file():
        return published_rates(json.loads(published.read_text()))
    if not path.is_file():
        raise RatesError(f"no rates of {gpu!r}: {path} does not exist; run `bench rates` on it")
    return rates_of(json.loads(path.read_text()))


def rates_of(report: dict[str, object]) -> Rates:
    """The rates in the JSON of a report of `bench rates`."""
    environment, rows = report["environment"], report["rows"]
    assert isinstance(environment, dict) and isinstance(rows, list)
    return Rates(
        gpu=str(environment["gpu"]),
        sms=int(environment["gpu_sms"]),
        values={(r["part"], r["what"], r["how"], r["unit"]): r["value"] for r in rows},
    )


def published_rates(published: dict[str, Any]) -> Rates:
    """The rates in the JSON of a file of published rates. What the file does not have is as on the
    GPU `otherwise`, except the parts that the file is `without`."""
    measured = load_rates(published["otherwise"])
    without = [tuple(which) for which in published["without"]]

    def kept(part: str, what: str, how: str) -> bool:
        return not any((part, what) == which[:2] and how.endswith(which[2]) for which in without)

    keys = [(r["part"], r["what"], r["how"], r["unit"]) for r in published["rows"]]
    own = dict(zip(keys, (float(r["value"]) for r in published["rows"]), strict=True))
    values = {key: value for key, value in measured.values.items() if kept(*key[:3])}
    named = published["sources"]
    return Rates(
        gpu=published["gpu"],
        sms=published["sms"],
        values=values | own,
        otherwise=measured,
        sources=dict(zip(keys, (named[r["source"]] for r in published["rows"]), strict=True)),
    )
