"""The recorded durations of `make test` are within its budget."""

from __future__ import annotations

from tests import durations

REFRESH = 'pytest FILE -m "not slow" --record-durations, then python -m tests.durations'


def test_every_test_file_is_recorded():
    assert set(durations.test_files()) == set(durations.read()) - {durations.START}, REFRESH


def test_the_quick_tests_keep_their_budget():
    total = sum(row["seconds"] for row in durations.read().values())
    assert total <= durations.BUDGET_S, "move what repeats a property behind @pytest.mark.slow"


def test_the_table_is_current():
    assert durations.PAGE.read_text() == durations.page(), REFRESH
