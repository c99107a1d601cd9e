"""The page of tested servers is in step with the recorded outcomes, and these with the tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from docs import clients_page
from tests.clients import results, unpack


def test_the_page_is_current():
    assert clients_page.page() == clients_page.PAGE.read_text(), "python -m docs.clients_page"


@pytest.mark.parametrize("client", [*unpack.CLIENTS, "gpu", "torch", "transformers"])
def test_the_outcomes_are_those_of_the_present_tests(client: str):
    found = results.read()[client]
    if client in unpack.CLIENTS:
        assert found["version"] == unpack.version(client)
    assert list(found["features"]) == list(dict.fromkeys(results.features(client))), (
        f"make test-clients CLIENTS={client} CLIENTS_ARGS=--record-clients"
    )


def test_a_list_names_each_package_once_with_its_version():
    for client in unpack.CLIENTS:
        installed, unpacked = unpack.listed(client)
        names = [requirement.partition("==")[0] for requirement in (*installed, *unpacked)]
        assert len(names) == len(set(names))
        assert all("==" in requirement for requirement in (*installed, *unpacked))


def test_the_main_process_records_the_outcomes_of_its_workers(monkeypatch: pytest.MonkeyPatch):
    written: list[dict[str, Any]] = []
    monkeypatch.setattr(results, "write", lambda client, found: written.append(found))
    passed, failed = {"outcome": "passed", "tests": 2}, {"outcome": "failed", "tests": 1}
    nodes = []
    for features in ({"a": passed, "b": passed}, {"a": failed, "c": passed}):
        worker, output = results.Recorder("vllm"), {}
        worker.features, worker.left_out = features, {"c"}
        worker.pytest_sessionfinish(session(workeroutput=output), 0)
        nodes.append(SimpleNamespace(workeroutput=output))
    assert written == []
    main = results.Recorder("vllm")
    for node in nodes:
        main.pytest_testnodedown(node)
    main.pytest_sessionfinish(session(), 2)  # interrupted
    main.pytest_sessionfinish(session(), 1)
    assert written == [{"a": {"outcome": "failed", "tests": 3}, "b": passed}]
    main.pytest_testnodedown(SimpleNamespace())  # a worker that died
    main.pytest_sessionfinish(session(), 1)
    assert len(written) == 1


def session(**config: Any) -> Any:
    return SimpleNamespace(config=SimpleNamespace(**config))
