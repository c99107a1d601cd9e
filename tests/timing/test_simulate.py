"""The simulated SM: warps share units, products and copies queue, phases wait for all arrivals."""

from __future__ import annotations

from collections import Counter

import pytest

from cute_attn.timing.code import FIRST_LINES, HELD_LINES, STARTED_LINES, CodeCache, Fetch
from cute_attn.timing.simulate import Machine, Result, Stuck, TensorCore, simulate
from cute_attn.timing.steps import (
    Arrive,
    Await,
    Commit,
    Copy,
    LaunchItems,
    Multiply,
    Product,
    TensorCopy,
    TensorMemory,
    Wait,
    WarpItems,
    Work,
)

FETCH = Fetch(
    {"SM": 20.0, "L2": 50.0, "memory": 100.0}, {"SM": 60.0, "L2": 200.0, "memory": 200.0}, "memory"
)
MACHINE = Machine(
    multiply=lambda n, from_registers: n / 2,
    multiply_latency=lambda from_registers: 50.0 if from_registers else 60.0,
    hand_over=50.0,
    meet=lambda warps: 10.0 * warps,
    l2_latency=400.0,
    memory_latency=800.0,
    l2_rate=64.0,
    memory_rate=16.0,
    store_rate=32.0,
    add_rate=8.0,
    store_latency=300.0,
    wavefront=1.0,
    operands=lambda n, from_registers: n / 4 + (0 if from_registers else 16),
    fence=50.0,
    fetch=FETCH,
    cluster_fence=700.0,
    tensor=TensorCore(
        multiply=lambda product: product.n / 2,
        late=lambda product: 150.0,
        operands=lambda product: product.n / 4 + (0 if product.from_tensor_memory else 32),
        load_rate=128.0,
        load_latency=100.0,
        store_rate=256.0,
        store_latency=30.0,
        copy=lambda nbytes: nbytes / 128,
        query=460.0,
    ),
)
MBARRIER, NAMED, CLUSTER = 0x100, 1 << 56, 2 << 56


def work(*, alu: float = 0.0, latency: float = 0.0, wavefronts: int = 0, loaded: int = 0) -> Work:
    units = (alu / 2, 0.0, 0.0, alu, 0.0, 0.0, alu / 2)
    return Work(units, latency, wavefronts, loaded, 0, 0, 0)


def run(*warps: list[object], signals: dict[int, list[tuple[int, int]]] | None = None) -> Result:
    """Simulate one CTA with these warps; the arrivals are counted."""
    signals = signals or {}
    contributions = Counter(
        (item.object, item.phase) for items in warps for item in items if isinstance(item, Arrive)
    )
    contributions.update(key for keys in signals.values() for key in keys)
    listed = [WarpItems(0, number, list(items)) for number, items in enumerate(warps)]
    return simulate(LaunchItems(listed, signals, contributions, 1.0), MACHINE, {0: 0})


def test_a_warp_alone_takes_its_latency_or_its_unit() -> None:
    assert run([work(alu=100, latency=300)]).ends[0] == pytest.approx(300)
    assert run([work(alu=500, latency=300)]).ends[0] == pytest.approx(500)


def test_warps_of_a_quarter_share_its_units() -> None:
    """Warps 0 and 4 are on one quarter, warp 1 is on another."""
    both = run([work(alu=100)], [], [], [], [work(alu=100)])
    assert both.ends[0] == pytest.approx(200)
    apart = run([work(alu=100)], [work(alu=100)])
    assert apart.ends[0] == pytest.approx(100)
    hidden = run([work(alu=100, latency=300)], [], [], [], [work(alu=100, latency=300)])
    assert hidden.ends[0] == pytest.approx(300)


def test_wavefronts_of_all_quarters_queue() -> None:
    result = run([work(latency=10, wavefronts=100)], [work(latency=10, wavefronts=100)])
    assert result.ends[0] == pytest.approx(200)
    assert result.busy["shared memory"] == pytest.approx(200)


def test_a_wait_ends_after_the_last_arrival() -> None:
    result = run(
        [work(latency=100), Arrive(MBARRIER, 1)],
        [work(latency=300), Arrive(MBARRIER, 1)],
        [Wait(MBARRIER, 1, 0), work(latency=10)],
    )
    assert result.ends[0] == pytest.approx(300 + 50 + 10)
    assert result.waits["barrier", MBARRIER] == pytest.approx(350)


def test_named_barriers_take_their_own_time() -> None:
    meeting = [work(latency=100), Arrive(NAMED, 1), Wait(NAMED, 1, 0)]
    assert run(meeting, meeting).ends[0] == pytest.approx(120)


def test_the_phase_before_the_first_is_complete() -> None:
    assert run([Wait(MBARRIER, 1, 0), work(latency=10)]).ends[0] == pytest.approx(10)


def test_products_of_warpgroups_take_turns() -> None:
    products = [Multiply(1, 128, False, 0), Multiply(2, 128, False, 0), Await("wgmma", 2, 0)]
    assert run(*[products] * 4).ends[0] == pytest.approx(2 * 64 + 60)
    two = run(*[products] * 8)
    assert two.ends[0] == pytest.approx(4 * 64 + 60)
    assert two.busy["tensor cores"] == pytest.approx(4 * 64)


def test_products_wait_for_arithmetic_of_their_quarter() -> None:
    """As `bench rates --only beside` found: their times at the port add up."""
    products = [Multiply(1, 512, True, 0), Await("wgmma", 1, 0)]
    alone = run(*[products] * 4)
    assert alone.ends[0] == pytest.approx(256 + 50)
    beside = run(*[products] * 4, [work(alu=200)])
    assert beside.ends[0] == pytest.approx(256 + 100 + 50)


def test_operands_and_accesses_share_the_wavefronts() -> None:
    """Products of N = 64 read for all of their 32 clocks."""
    products = [*(Multiply(n, 64, False, 0) for n in (1, 2, 3, 4)), Await("wgmma", 4, 0)]
    assert run(*[products] * 4).ends[0] == pytest.approx(4 * 32 + 60)
    beside = run(*[products] * 4, [work(wavefronts=100)])
    assert beside.ends[0] == pytest.approx(4 * 32 + 100 + 60)


def test_a_fence_waits_for_stores() -> None:
    assert run([work(wavefronts=100)._replace(fences=1)]).ends[0] == pytest.approx(100 + 50)


def test_a_wait_before_any_product_is_over() -> None:
    assert run(*[[Await("wgmma", 0, 0), work(latency=10)]] * 4).ends[0] == pytest.approx(10)


def test_a_product_starts_when_all_four_warps_have_come() -> None:
    product = [Multiply(1, 128, False, 0), Await("wgmma", 1, 0)]
    late = [work(latency=500), *product]
    assert run(product, product, product, late).ends[0] == pytest.approx(500 + 64 + 60)


@pytest.mark.parametrize(("missed", "clocks"), [(False, 6400 / 64 + 400), (True, 6400 / 16 + 800)])
def test_a_copy_signals_when_its_bytes_are_there(missed: bool, clocks: float) -> None:
    result = run(
        [Copy("load", 7, 6400, missed, 0), Wait(MBARRIER, 1, 0)], signals={7: [(MBARRIER, 1)]}
    )
    assert result.ends[0] == pytest.approx(clocks + 50)


def test_bytes_of_copies_queue_and_latencies_overlap() -> None:
    copies = [Copy("load", number, 6400, False, 0) for number in (1, 2)]
    result = run([*copies, Wait(MBARRIER, 1, 0)], signals={1: [(MBARRIER, 1)], 2: [(MBARRIER, 1)]})
    assert result.ends[0] == pytest.approx(2 * 100 + 400 + 50)


def test_a_store_is_awaited_by_its_group() -> None:
    stores = [Copy("store", 1, 3200, False, 1), Copy("store", 2, 3200, False, 2)]
    read = run([*stores, Await("bulk read", 1, 0)])
    assert read.waits["bulk read", 0] == pytest.approx(100 + 300)
    assert run([*stores, Await("bulk", 2, 0)]).waits["bulk", 0] == pytest.approx(200 + 300)


def test_a_launch_ends_when_its_stores_have_arrived() -> None:
    assert run([Copy("store", 1, 3200, False, 1)]).ends[0] == pytest.approx(100 + 300)
    assert run([work(latency=10)._replace(stored=3200)]).ends[0] == pytest.approx(100 + 400)


def test_loads_of_a_warp_take_the_port() -> None:
    assert run([work(latency=10, loaded=6400)]).ends[0] == pytest.approx(100 + 400)


def test_code_is_fetched_once_for_an_sm() -> None:
    first = work(latency=10)._replace(runs=((0, 3),))
    warps = [WarpItems(0, number, [first, first]) for number in range(2)]
    launch = LaunchItems(warps, {}, Counter(), 1.0, [((0,),), ((0, 1),), ((2,),)])
    result = simulate(launch, MACHINE, {0: 0})
    assert result.busy["instruction fetch"] == pytest.approx(60 + 3 * 20)
    assert result.ends[0] == pytest.approx(120 + 10)


def test_code_comes_from_where_it_is() -> None:
    """The start of the code is in the SM. The rest comes from beyond, and stays as long as there is
    room."""
    code = [((n,),) for n in range(HELD_LINES + 1)]
    cache = CodeCache(code, FETCH, held=False)
    assert cache.clocks(((0, 1),))[0] == 60 + 20
    assert cache.clocks(((0, 2),))[0] == 20
    far = ((STARTED_LINES, 1),)
    assert cache.clocks(far)[0] == 200 + 100
    assert cache.clocks(((0, FIRST_LINES),))[0] == 20 * (FIRST_LINES - 2)
    assert cache.clocks(far)[0] == 60 + 20
    assert CodeCache(code, FETCH, held=True).clocks(far)[0] == 60 + 20


def test_warps_go_along_with_the_first_to_fetch() -> None:
    """More code than the first cache holds: a warp at the same place fetches nothing, a warp that
    comes after other code does."""
    code = [((n,),) for n in range(2 * HELD_LINES)]
    cache = CodeCache(code, FETCH, held=True)
    much, other = ((0, 2 * FIRST_LINES),), ((HELD_LINES // 2, 2 * FIRST_LINES),)
    assert cache.clocks(much, warp=0)[0] > 0
    assert cache.clocks(much, warp=1)[0] == 0
    assert cache.clocks(other, warp=0)[0] > 0
    assert cache.clocks(much, warp=2)[0] > 0


def test_copies_of_a_loop_have_code_of_their_own() -> None:
    cache = CodeCache([((0,), (1,))], FETCH, held=True)
    assert [cache.clocks(((0, 1),))[0] for _ in range(3)] == [80, 80, 0]


def test_sms_share_rates_by_their_bytes() -> None:
    """Of 100 CTAs on 132 SMs, every second has nothing to load, and all store the same."""
    stores = Copy("store", 1, 1024, False, 1)
    warps = [WarpItems(cta, 0, [work(loaded=4096 * (cta % 2)), stores]) for cta in range(10)]
    launch = LaunchItems(warps, {}, Counter(), 1.0)
    assert launch.sharers(132, 100) == (pytest.approx(50), pytest.approx(100))
    assert launch.sharers(40, 100) == (40, 40)


def test_warps_that_wait_for_each_other_are_reported() -> None:
    other = MBARRIER + 8
    with pytest.raises(Stuck, match="2 warps never end"):
        run([Wait(MBARRIER, 1, 0), Arrive(other, 1)], [Wait(other, 1, 0), Arrive(MBARRIER, 1)])


def test_products_of_a_pair_keep_both_tensor_cores_busy() -> None:
    """Products queue, and are signalled in order; a pair's product is on two SMs."""
    products = [Product(n, 256, 128, 16, 1, False, 1) for n in (1, 2)]
    warps = [
        WarpItems(0, 0, [*products, Commit(3), Wait(MBARRIER, 1, 0)]),
        WarpItems(1, 0, [work(latency=10)]),
    ]
    launch = LaunchItems(warps, {3: [(MBARRIER, 1)]}, Counter({(MBARRIER, 1): 1}), 1.0)
    result = simulate(launch, MACHINE, {0: 0, 1: 1})
    assert result.ends[0] == pytest.approx(2 * 64 + 150)
    assert result.busy["tensor cores"] == pytest.approx(2 * 2 * 64)
    assert result.busy["shared memory"] == pytest.approx(2 * 2 * 64)


def test_operands_in_shared_memory_limit_narrow_products() -> None:
    """64 columns take 32 clocks, and their operands 48 wavefronts, unless A is in tensor memory."""

    def ends(from_tensor_memory: bool) -> float:
        product = Product(1, 128, 64, 16, 1, from_tensor_memory, None)
        items = [product, product, Commit(3), Wait(MBARRIER, 1, 0)]
        return run(items, signals={3: [(MBARRIER, 1)]}).ends[0]

    assert ends(True) == pytest.approx(2 * 32 + 150)
    assert ends(False) == pytest.approx(2 * 48 + 150)


def test_a_commit_after_a_copy_to_tensor_memory() -> None:
    items = [TensorCopy(1, 12800, None), Commit(2), Wait(MBARRIER, 1, 0)]
    assert run(items, signals={2: [(MBARRIER, 1)]}).ends[0] == pytest.approx(100 + 50)


def test_warps_of_a_quarter_share_tensor_memory() -> None:
    load = [TensorMemory("tcgen05.ld", 4096), Await("tcgen05.ld", 0, 0)]
    assert run(load).ends[0] == pytest.approx(32 + 100)
    assert run(load, load).ends[0] == pytest.approx(32 + 100)
    assert run(load, [], [], [], load).ends[0] == pytest.approx(64 + 100)
    store = [TensorMemory("tcgen05.st", 4096), Await("tcgen05.st", 0, 0)]
    assert run(store).ends[0] == pytest.approx(16 + 30)


def test_a_request_for_work_is_answered() -> None:
    items = [Copy("query", 1, 0, False, 0), Wait(MBARRIER, 1, 0)]
    assert run(items, signals={1: [(MBARRIER, 1)]}).ends[0] == pytest.approx(460 + 50)


def test_a_multicast_takes_the_ports_of_all_its_sms() -> None:
    copies = [Copy("load", number, 6400, False, 0, (1,)) for number in (1, 2)]
    warps = [
        WarpItems(0, 0, [*copies, Wait(MBARRIER, 1, 0)]),
        WarpItems(1, 0, [work(latency=10, loaded=6400)]),
    ]
    signals = {number: [(MBARRIER, 1)] for number in (1, 2)}
    launch = LaunchItems(warps, signals, Counter({(MBARRIER, 1): 2}), 1.0)
    result = simulate(launch, MACHINE, {0: 0, 1: 1})
    assert result.ends[1] == pytest.approx(3 * 100 + 400)


def test_an_arrival_at_a_clusters_barrier_has_a_fence() -> None:
    meeting = [work(latency=100), Arrive(CLUSTER, 1, fence=True), Wait(CLUSTER, 1, 0)]
    assert run(meeting, meeting).ends[0] == pytest.approx(100 + 700 + 20)
    relaxed = [work(latency=100), Arrive(CLUSTER, 1), Wait(CLUSTER, 1, 0)]
    assert run(relaxed, relaxed).ends[0] == pytest.approx(100 + 20)
