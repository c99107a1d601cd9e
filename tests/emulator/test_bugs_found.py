"""What docs/bugs_found.md says of other packages' kernels is so, and their mended forms are clean.

Each compiles a kernel twice; `test_peers.test_the_known_bug_is_still_there` is the quick one.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cute_attn.bench.peers import missing

from .bugs_found import BUGS

PAGE = Path(__file__).parents[2] / "docs/bugs_found.md"
EXPECTED = {  # the check, and what stands in the findings
    "mla-forward-1cta": ("race", "tcgen05.mma is not ordered after the access by SM"),
    "mla-forward-1cta-kb64": ("race", "tcgen05.mma is not ordered after the access by SM"),
    "mla-forward-2cta": ("cluster", "arrive at the cluster barrier again"),
    "backward-hd128-2cta": ("exit", "signals an mbarrier of CTA rank 1 of the cluster"),
}
WRONG = {"mla-forward-1cta"}  # of which the results are


def test_the_page_names_every_reproduction() -> None:
    named = re.findall(r"python -m tests\.emulator\.bugs_found ([\w-]+)", PAGE.read_text())
    assert sorted(named) == sorted(BUGS) == sorted(EXPECTED)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_the_bug_shows_and_the_change_mends_it(name: str) -> None:
    bug = BUGS[name]
    if reason := missing(bug.request(()).peer):
        pytest.skip(reason)
    check, message = EXPECTED[name]
    for schedule in bug.schedules:
        run = bug.run(schedule, mended=False)
        assert run.findings and {finding.check for finding in run.findings} == {check}
        assert any(message in finding.message for finding in run.findings)
        assert (max(run.errors.values()) > 0.05) == (name in WRONG), run.errors
        run = bug.run(schedule, mended=True)
        assert run.findings == []
        assert max(run.errors.values()) < 0.005, run.errors
