"""A calibrated device's file: what is written is read, and what is wrong with one is told at once."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.config.base import PlanError
from shardwright.config.catalog_entry import read_entry
from shardwright.config.cluster import DeviceSpec
from shardwright.config.measured_table import MeasuredTable, sizes_of
from shardwright.config.toml_file import read_toml
from shardwright.config.toml_text import toml_text

PLAIN = st.one_of(
    st.integers(-(2**62), 2**62), st.floats(allow_nan=False, allow_infinity=False), st.booleans(),
    st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=20),
)  # fmt: skip
KEYS = st.text("abcdefgh_", min_size=1, max_size=6)
VALUES = st.one_of(PLAIN, st.lists(PLAIN, max_size=60), st.lists(st.lists(PLAIN, max_size=3), max_size=3))
SECTIONS = st.dictionaries(KEYS, VALUES, min_size=1, max_size=6)


@given(st.dictionaries(KEYS, st.one_of(VALUES, SECTIONS, st.lists(SECTIONS, min_size=1, max_size=3)), max_size=6))
@settings(deadline=None, max_examples=100)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, fields: dict[str, Any]) -> None:
    file = tmp_path_factory.mktemp("toml") / "any.toml"
    file.write_text(toml_text(fields), encoding="utf-8")
    assert read_toml(file) == fields


def good() -> dict[str, Any]:
    return {"work": "all_reduce", "sizes": [[2.0], [256.0, 65536.0]], "seconds": [1e-5, 1e-4]}


def test_no_product_is_faster_than_the_peak() -> None:
    """Each pass of it, against the peak of its number type; where no peak is known there is nothing to say."""
    table = {"work": "product", "sizes": [[1e3], [1e3], [1e3, 2e3]], "seconds": [4e-3, 8e-3]}  # 2e9 and 4e9 FLOPs
    table |= {"backward": [4e-3, 8e-3], "weight_grad": [4e-3, 4e-3]}  # 1e12 FLOP/s at most

    def device(peaks: dict[str, float]) -> DeviceSpec:
        return DeviceSpec.model_validate({"name": "x", "memory_gib": 8.0, "peak_tflops": peaks, "measured": [table]})

    assert device({"float32": 1.0}).measured[0].most_flops() == 1e12
    assert device({"bfloat16": 0.5}).measured
    with pytest.raises(ValueError, match=r"table 0 has one of 1 TFLOP/s where peak_tflops.float32 is 0.5; mend"):
        device({"float32": 0.5})


def test_sizes_are_named() -> None:
    assert sizes_of("product") == ("rows", "inner", "columns")
    assert sizes_of("update") == ("elements",)
    assert MeasuredTable.model_validate(good()).busy == 1


FAULTS = {
    "no work": ({"work": "dancing"}, "work"),
    "too few sizes": ({"sizes": [[2.0]]}, "ranks, bytes"),
    "a size is missing": ({"seconds": [1e-5]}, "2 seconds for 1 x 2 sizes"),
    "not ascending": ({"sizes": [[2.0], [65536.0, 256.0]]}, "ascending order"),
    "no seconds": ({"seconds": [1e-5, 0.0]}, "greater than or equal to"),
    "no number": ({"number": "int4"}, "number"),
    "a backward": ({"backward": [1e-5, 1e-4]}, "0 backward"),
    "unknown": ({"colour": "red"}, "colour"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_damaged_table_is_told(tmp_path: Path, name: str) -> None:
    change, printed = FAULTS[name]
    file = tmp_path / "damaged.toml"
    file.write_text(toml_text({"memory_gib": 1.0, "measured": [good(), good() | change]}), encoding="utf-8")
    with pytest.raises(PlanError) as error:
        read_entry("devices", str(file), DeviceSpec)
    (fault,) = error.value.faults
    assert fault.startswith("measured.1") and printed in fault


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "damaged.toml"
    file.write_text(toml_text({"measured": [good() | of for of, _ in FAULTS.values()]}), encoding="utf-8")
    with pytest.raises(PlanError) as error:
        read_entry("devices", str(file), DeviceSpec)
    assert len(error.value.faults) == len(FAULTS) + 1  # memory_gib is missing too
