"""Tests of real servers, each in an interpreter of its own: `make test-clients`.

A test names the feature that it shows: `@pytest.mark.clients("Sliding windows")`. With
--record-clients, a run writes the outcome of each feature to results.json, from which
`python -m docs.clients_page` makes the table in docs/clients.md.
"""

from __future__ import annotations

import os

import pytest

from . import results, unpack

CLIENT = "CUTE_ATTN_CLIENT"  # which client's packages are on the path


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-clients", action="store_true", help="write the outcomes to results.json"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("record_clients", default=False):
        config.pluginmanager.register(results.Recorder(os.environ[CLIENT]))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the tests of test_vllm*.py unless this is the interpreter for vLLM, and so on. A client
    without a list of packages is in every environment."""
    client = item.path.stem.removeprefix("test_").partition("_")[0]
    others = client in unpack.CLIENTS and os.environ.get(CLIENT) != client
    if item.get_closest_marker("clients") and others:
        pytest.skip(f"needs {client}'s packages: make test-clients")
