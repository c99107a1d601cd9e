"""Edges of a pipeline: properties that the host derives from their declaration."""

from __future__ import annotations

from typing import Any

import pytest

from cute_attn.kernels.common.pipeline import HARDWARE, Edge, Kind, Pipeline, Reach, Role

LOAD, MATH = Role("load", range(1)), Role("math", range(1, 4))


@pytest.mark.parametrize(
    ("producer", "kind", "reach", "arrivals"),
    [
        (LOAD, Kind.BYTES, Reach.CTA, 1),
        (LOAD, Kind.BYTES, Reach.LEADER, 1),  # the leader alone expects the bytes of both
        (LOAD, Kind.COMMIT, Reach.PAIR, 1),
        (MATH, Kind.WARPS, Reach.CTA, 3),
        (MATH, Kind.WARPS, Reach.LEADER, 6),
        (MATH, Kind.THREADS, Reach.CTA, 96),
        (LOAD, Kind.BYTES | Kind.THREADS, Reach.CTA, 33),
        (MATH, Kind.WARPS, Reach.PARTNER, 3),
        (MATH, Kind.WARPS, Reach.FIRST, 6),
        (HARDWARE, Kind.BYTES, Reach.CLUSTER, 1),
    ],
)
def test_arrivals_follow_from_role_kind_and_reach(
    producer: Role, kind: Kind, reach: Reach, arrivals: int
) -> None:
    assert Edge("full", producer, MATH, 1, kind, reach).arrivals == arrivals


def test_a_pipeline_tells_its_edges_the_size_of_the_cluster() -> None:
    pipeline = Pipeline(
        Edge("read", MATH, LOAD, 1, Kind.WARPS, Reach.FIRST),
        Edge("ready", MATH, LOAD, 1, Kind.WARPS, Reach.LEADER),
        Edge("sent", MATH, MATH, 1, Kind.WARPS, Reach.PARTNER),
        cluster=4,
    )
    assert [edge.arrivals for edge in pipeline] == [12, 6, 3]
    assert [str(edge) for edge in pipeline] == [
        "math of all CTAs -> load of CTA 0",
        "math of both CTAs -> load of the leader",
        "math -> math of the partner",
    ]


def test_an_edge_by_warp_has_a_ring_for_each_warp() -> None:
    pipeline = Pipeline(
        Edge("sent", MATH, MATH, 2, Kind.WARPS, by_warp=True),
        Edge("next", MATH, LOAD, 1, Kind.WARPS),
    )
    assert [edge.mbarriers for edge in pipeline] == [6, 1]
    assert pipeline["sent"].arrivals == 1
    assert pipeline.offsets == {"sent": 0, "next": 6}
    assert pipeline.names(0)["sent"] == (0, 48, 8)
    assert pipeline.table().splitlines()[2] == "| `sent` | math -> math | 2 a warp | 1 | warps |  |"


PIPELINE = Pipeline(
    Edge("full", LOAD, MATH, 3, Kind.BYTES, Reach.LEADER, "a tile"),
    Edge("empty", MATH, LOAD, 3, Kind.WARPS, payload="its stage"),
    Edge("done", LOAD, MATH, 1, Kind.BYTES | Kind.WARPS),
)


def test_mbarriers_lie_one_after_the_other() -> None:
    assert PIPELINE.nbytes == 7 * 8
    assert PIPELINE.names(1024) == {
        "full": (1024, 24, 8),
        "empty": (1048, 24, 8),
        "done": (1072, 8, 8),
    }


def test_the_table_of_a_pipeline() -> None:
    assert PIPELINE.table().splitlines()[2:] == [
        "| `full` | load of both CTAs -> math of the leader | 3 | 1 | bytes | a tile |",
        "| `empty` | math -> load | 3 | 3 | warps | its stage |",
        "| `done` | load -> math | 1 | 2 | bytes and warps |  |",
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stages": 0}, "full has 0 stages, must have at least 1"),
        ({"kind": Kind(0)}, "full has no kind"),
        ({"by_warp": True}, "full: its producer and consumer have different warps"),
        ({"producer": HARDWARE, "kind": Kind.WARPS}, "full: its producer hardware has no warps"),
    ],
)
def test_what_no_mbarrier_can_do_is_refused(fields: dict[str, Any], message: str) -> None:
    good = {
        "name": "full", "producer": LOAD, "consumer": MATH, "stages": 1, "kind": Kind.BYTES,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        Edge(**{**good, **fields})


def test_an_edge_declared_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="edge full is declared twice"):
        Pipeline(*PIPELINE, PIPELINE["full"])
