"""Writes the tables of clients.md.

    python -m docs.clients_page

reads tests/clients/results.json, which `make test-clients CLIENTS_ARGS=--record-clients` writes,
and what stands in for the compiled parts of each client.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.clients import results, unpack

from .kernels.page_tables import filled

PAGE = Path(__file__).with_name("clients.md")
NAMES = {
    "fla": "flash-linear-attention",
    "gpu": "PyTorch",
    "kernels": "Hugging Face kernels",
    "sglang": "SGLang",
    "torch": "PyTorch",
    "transformers": "transformers",
    "vllm": "vLLM",
}


def named(client: str, found: dict[str, Any]) -> str:
    """A client with its version, and whether the tests ran on a GPU."""
    return f"{NAMES[client]} {found['version']}{', on a GPU' * ('on' in found['beside'])}"


def outcomes() -> str:
    """A row for each feature of each client."""
    lines = ["| Client | Feature | Result |", "| --- | --- | --- |"]
    for client, found in results.read().items():
        if client == "transformers":
            continue  # see `models`
        for feature, row in found["features"].items():
            count = f", {row['tests']} tests" if row["tests"] > 1 else ""
            why = f": {row['why']}" if "why" in row else ""
            lines.append(f"| {named(client, found)} | {feature} | {row['outcome']}{why}{count} |")
    return "\n".join(lines)


def models() -> str:
    """transformers: a row for each feature, a column for each model, and why a cell is no."""
    cells: dict[str, dict[str, str]] = {}
    reasons: list[str] = []
    found = results.read().get("transformers", {"features": {}})
    for name, row in found["features"].items():
        model, _, feature = name.partition(": ")
        cell = "yes" if row["outcome"] == "passed" else row["outcome"]
        if "why" in row:
            if row["why"] not in reasons:
                reasons.append(row["why"])
            cell = f"no ({reasons.index(row['why']) + 1})"
        cells.setdefault(feature, {})[model] = cell
    names = list(dict.fromkeys(model for row in cells.values() for model in row))
    lines = [f"| Feature | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]
    for feature, row in cells.items():
        lines.append(f"| {feature} | {' | '.join(row.get(model, '') for model in names)} |")
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    return "\n".join([*lines, "", *notes])


def versions() -> str:
    """When each client's tests ran, and beside which packages."""
    lines = ["| Client | Date | Python | Beside |", "| --- | --- | --- | --- |"]
    for client, found in results.read().items():
        beside = ", ".join(f"{name} {version}" for name, version in found["beside"].items())
        lines.append(f"| {named(client, found)} | {found['date']} | {found['python']} | {beside} |")
    return "\n".join(lines)


def stand_ins() -> str:
    """What stands in for compiled code, or says something else of the machine than the truth."""
    lines = ["| Client | Stands in for | Why |", "| --- | --- | --- |"]
    for client in unpack.CLIENTS:
        name = f"tests.clients.{client}_emulated"
        if find_spec(name) is None:  # FLA is pure Python
            continue
        for what, why in import_module(name).stand_ins():
            lines.append(f"| {NAMES[client]} | `{what}` | {why} |")
    return "\n".join(lines)


def page() -> str:
    parts = {
        "outcomes": outcomes(),
        "models": models(),
        "versions": versions(),
        "stand-ins": stand_ins(),
    }
    return filled(PAGE.read_text(), parts)


if __name__ == "__main__":
    PAGE.write_text(page())
