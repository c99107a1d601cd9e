import os

import pytest

from cute_attn.bench.harness.processes import ChildError, run_child

ENV = dict(os.environ)


def test_a_child_says_its_result_last():
    assert run_child("print('noise'); print('{\"ms\": 1.5}')", ENV) == {"ms": 1.5}


@pytest.mark.parametrize(
    "text", ["raise SystemExit('broken')", "print('no json')", "print('[1]')", "pass"]
)
def test_a_child_that_fails_is_an_error(text):
    with pytest.raises(ChildError, match="a measured process exited"):
        run_child(text, ENV)


def test_a_child_that_fails_says_why():
    with pytest.raises(ChildError, match=r"(?s)exited with 1:.*no such thing"):
        run_child("raise SystemExit('no such thing')", {})
