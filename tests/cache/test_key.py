"""Keys are canonical and unambiguous, and refused if they could never match."""

from __future__ import annotations

import dataclasses
import enum
import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_specs import SCALE, ScaleSpec

from cute_attn import cache
from cute_attn.cache.key import KeyDescription, canonical_text, spec_items


class Mask(enum.Enum):
    NONE = "none"
    CAUSAL = "causal"


class Stages(enum.IntEnum):
    TWO = 2


@dataclass(frozen=True)
class AnySpec:
    value: Any


dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
plain = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 3) | st.integers(),
        st.floats(allow_nan=False),
        st.sampled_from([0.0, -0.0, 1.0, -1.0]),
        st.text(max_size=5) | st.sampled_from(["1", "True", "None", "(1,)", "torch.float32"]),
        st.sampled_from([*Mask, *Stages]),
        dtypes,
    ),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


def identical(a: Any, b: Any) -> bool:
    """Equal, and of equal types throughout."""
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(identical, a, b))
    if isinstance(a, float):
        return a.hex() == b.hex()
    return bool(a == b)


@given(plain, plain)
def test_canonical_text_is_the_same_only_for_the_same_value(a: Any, b: Any) -> None:
    assert (canonical_text(a, "a") == canonical_text(b, "b")) == identical(a, b)


@given(plain)
def test_canonical_text_is_one_line(value: Any) -> None:
    assert "\n" not in canonical_text(value, "value")


def test_true_one_and_one_point_zero_have_three_keys() -> None:
    keys = {cache.describe(SCALE, AnySpec(v), "sm_90a").digest for v in (True, 1, 1.0, "1", (1,))}
    assert len(keys) == 5


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(()),
        torch.tensor(4096),
        [1, 2],
        {"a": 1},
        {1},
        b"bytes",
        object(),
        float,
        1 + 2j,
        torch.device("cpu"),
        torch.Size([1]),
        (1, (2, torch.zeros(1))),
    ],
    ids=lambda value: type(value).__name__,
)
def test_anything_that_is_not_plain_is_a_type_error_naming_the_field(value: Any) -> None:
    with pytest.raises(TypeError, match=r"AnySpec\.value"):
        cache.describe(SCALE, AnySpec(value), "sm_90a")


def test_numpy_scalars_are_refused_although_some_are_floats() -> None:
    numpy = pytest.importorskip("numpy")
    for value in (numpy.float64(1.0), numpy.int64(1)):
        with pytest.raises(TypeError, match=r"AnySpec\.value"):
            cache.describe(SCALE, AnySpec(value), "sm_90a")


def test_nan_is_refused() -> None:
    with pytest.raises(TypeError, match="NaN"):
        cache.describe(SCALE, AnySpec(float("nan")), "sm_90a")


@dataclass
class ThawedSpec:
    value: int = 1


@pytest.mark.parametrize("spec", [ThawedSpec(), {"a": 1}, 3, None, AnySpec])
def test_a_spec_is_an_instance_of_a_frozen_dataclass(spec: Any) -> None:
    with pytest.raises(TypeError, match="frozen dataclass"):
        cache.describe(SCALE, spec, "sm_90a")


@cache.spec
class StrictSpec:
    head_dim: int
    causal: bool = False

    def __post_init__(self) -> None:
        if self.head_dim % 8:
            raise ValueError("head_dim must be a multiple of 8")


def test_cache_spec_checks_when_the_instance_is_made() -> None:
    with pytest.raises(TypeError, match=r"StrictSpec\.head_dim is a torch\.Tensor"):
        StrictSpec(torch.tensor(64))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="multiple of 8"):
        StrictSpec(63)


def test_cache_spec_is_a_frozen_dataclass_that_tells_true_from_one() -> None:
    assert StrictSpec(64, True) == StrictSpec(64, True)
    assert hash(StrictSpec(64, True)) == hash(StrictSpec(64, True))
    assert StrictSpec(64, True) != StrictSpec(64, 1)  # type: ignore[arg-type]
    assert StrictSpec(64) != AnySpec(64)
    assert dataclasses.replace(StrictSpec(64), head_dim=128).head_dim == 128
    assert repr(StrictSpec(64)) == "StrictSpec(head_dim=64, causal=False)"
    with pytest.raises(dataclasses.FrozenInstanceError):
        StrictSpec(64).head_dim = 128  # type: ignore[misc]
    assert spec_items(StrictSpec(64)) == (("head_dim", "64"), ("causal", "False"))


def test_the_description_is_text_that_people_can_read() -> None:
    key = cache.describe(SCALE, ScaleSpec(2.0), "sm_90a")
    lines = key.text.splitlines()
    assert lines[:6] == [
        "key: cute kernel key 2",
        "kernel: scale",
        "target: toy_kernels:Scale",
        "spec: ScaleSpec",
        "spec.factor: 2.0",
        "arch: sm_90a",
    ]
    assert [line.partition(":")[0] for line in lines[6:]] == [
        "options",
        "dsl",
        "cuda",
        "tvm_ffi",
        "platform",
        "source toy_kernels",
        "source toy_specs",
    ]


def test_every_field_is_in_the_digest() -> None:
    key = cache.describe(SCALE, ScaleSpec(2.0), "sm_90a")
    changed = {
        "kernel": "other",
        "target": "toy_kernels:Other",
        "spec_class": "OtherSpec",
        "spec": (("factor", "3.0"),),
        "arch": "sm_100a",
        "options": "--opt-level 1",
        "dsl": "0.0.0",
        "cuda": "cu99",
        "tvm_ffi": "9.9",
        "platform": "plan9-vax-libc",
        "packages": (("numpy", "numpy 0.0"),),
        "sources": (("toy_kernels", "0" * 64),),
    }
    assert set(changed) == {f.name for f in dataclasses.fields(KeyDescription)}
    digests = {dataclasses.replace(key, **{name: v}).digest for name, v in changed.items()}
    assert len(digests | {key.digest}) == len(changed) + 1


def test_an_open_description_stands_for_what_agrees_in_all_that_it_knows() -> None:
    key = dataclasses.replace(
        cache.describe(SCALE, ScaleSpec(), "sm_90a"), packages=(("numpy", "numpy 2.0"),)
    )
    unknown = dataclasses.replace(key, packages=(("numpy", None),))
    other = dataclasses.replace(key, packages=(("numpy", "numpy 1.0"),))
    assert not key.is_open
    assert unknown.is_open
    assert unknown.admits(key)
    assert key.opened().admits(key)
    assert not unknown.admits(dataclasses.replace(key, packages=()))
    assert not other.opened().admits(dataclasses.replace(key, arch="sm_80"))
    assert not other.admits(key)
    assert "package numpy: any\n" in unknown.text
    assert unknown.differences(key) == []


def test_a_kernel_names_its_sources_in_a_tuple() -> None:
    assert cache.KernelDef("k", "m:K", sources=["a"]).sources == ("a",)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sources is 'a', must be a tuple"):
        cache.KernelDef("k", "m:K", sources="a")  # type: ignore[arg-type]


def test_a_description_survives_json() -> None:
    key = cache.describe(SCALE, ScaleSpec(0.1), "sm_90a")
    key = dataclasses.replace(key, packages=(("numpy", "numpy 2.0"), ("unknown", None)))
    again = KeyDescription.from_json(json.loads(json.dumps(key.to_json())))
    assert again == key
    assert again.digest == key.digest


def test_compiler_settings_in_the_environment_are_in_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = cache.describe(SCALE, ScaleSpec(), "sm_90a")
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    after = cache.describe(SCALE, ScaleSpec(), "sm_90a")
    assert after.digest != before.digest
    assert before.differences(after) == ["options:  here, CUTE_DSL_LINEINFO=1 there"]


@pytest.mark.parametrize("target", ["", "module", "module:", ":Class"])
def test_a_kernel_needs_a_target(target: str) -> None:
    with pytest.raises(ValueError, match="target"):
        cache.KernelDef("name", target)
