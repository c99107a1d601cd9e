from enum import IntEnum
from types import SimpleNamespace

import pytest

from cute_attn.bench.harness.green_context import GreenContextError, sm_partition


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_SUPPORTED = 801


class FakeDriver:
    """The part of cuda.bindings.driver that a partition needs; calls return (status, *results)."""

    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __init__(self, total=132, granularity=8, failing=None):
        self.total, self.granularity, self.failing = total, granularity, failing
        self.log = []

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*args):
            self.log.append(name)
            if name == self.failing:
                return (Status.CUDA_ERROR_NOT_SUPPORTED, None)
            return (Status.CUDA_SUCCESS, *self.results(name, *args))

        return call

    def results(self, name, *args):
        if name == "cuDeviceGetDevResource":
            return [SimpleNamespace(sm=SimpleNamespace(smCount=self.total))]
        if name == "cuDevSmResourceSplitByCount":
            groups, _, flags, least = args
            assert (groups, flags) == (1, 0)
            granted = -(-least // self.granularity) * self.granularity
            self.group = SimpleNamespace(sm=SimpleNamespace(smCount=granted))
            return [[self.group], 1, SimpleNamespace()]
        if name == "cuDevResourceGenerateDesc":
            assert args == ([self.group], 1)
            return ["description"]
        if name == "cuGreenCtxCreate":
            assert args == ("description", "device", 1)
            return ["context"]
        if name == "cuGreenCtxGetDevResource":
            return [self.group]
        return {"cuDeviceGet": ["device"], "cuGreenCtxStreamCreate": [0xBEEF]}.get(name, [])


def test_the_count_is_what_the_driver_granted():
    driver = FakeDriver()
    with sm_partition(78, driver=driver) as (stream, granted):
        assert (stream, granted) == (0xBEEF, 80)
        assert "cuGreenCtxDestroy" not in driver.log
    assert driver.log[-3:] == ["cuStreamSynchronize", "cuStreamDestroy", "cuGreenCtxDestroy"]


def test_everything_is_given_back_after_an_error_inside():
    driver = FakeDriver()
    with pytest.raises(ZeroDivisionError), sm_partition(8, driver=driver):
        raise ZeroDivisionError
    assert driver.log[-1] == "cuGreenCtxDestroy"


def test_a_refusal_names_the_step_and_the_status():
    driver = FakeDriver(failing="cuGreenCtxStreamCreate")
    message = "cuGreenCtxStreamCreate failed: CUDA_ERROR_NOT_SUPPORTED"
    with pytest.raises(GreenContextError, match=message), sm_partition(8, driver=driver):
        pass
    assert driver.log[-1] == "cuGreenCtxDestroy"


def test_more_sms_than_there_are():
    with (
        pytest.raises(GreenContextError, match="133 SMs asked for, the GPU has 132"),
        sm_partition(133, driver=FakeDriver()),
    ):
        pass


def test_the_driver_binding_has_what_is_used():
    """The real module, which imports without a driver, has the names that are used."""
    driver = pytest.importorskip("cuda.bindings.driver")
    for name in (
        "cuInit", "cuDeviceGet", "cuDeviceGetDevResource", "cuDevSmResourceSplitByCount",
        "cuDevResourceGenerateDesc", "cuGreenCtxCreate", "cuGreenCtxGetDevResource",
        "cuGreenCtxStreamCreate", "cuStreamSynchronize", "cuStreamDestroy", "cuGreenCtxDestroy",
    ):  # fmt: skip
        assert callable(getattr(driver, name))
    assert driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    assert driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    assert driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    assert driver.CUdevResource().sm.smCount == 0
