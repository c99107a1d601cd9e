"""The engine is built once for all test runs: it is named for what it was made of."""

from __future__ import annotations

from pathlib import Path

from cute_attn.emulator import build

build.directory = Path(__file__).parents[2] / "build" / "emulator"
