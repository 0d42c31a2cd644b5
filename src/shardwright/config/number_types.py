"""The number types of a step, with their facts. No other file lists their names."""

from dataclasses import dataclass
from typing import Annotated, Literal

from shardwright.config.registry import NameOf, Registry


@dataclass(frozen=True, kw_only=True)
class NumberType:
    """The facts of a number type.

    - `place` orders lists of number types.
    - `peak` is the name of its peak rate in a device's entry (peak_tflops).
    - `other_names` are its names in other systems and in tables of measured runs.
    - `num_bytes` is the size of an element of a weight, an activation or a gradient, and `torch_dtype` the name of its
      dtype. They are 0 and empty if only the operands of products have this type: such a number is narrow.
    - `product_constant` names the efficiency of products of narrow numbers (cost/calibration.py).
    - `holds_moments`: the optimizer's moments can be kept in it.
    - `needs_loss_scale`: small gradients are lost unless the loss is scaled.
    - `usual_until` is the month in which runs on devices that have bf16 mostly left it.
    """

    name: str
    place: int
    peak: str
    other_names: tuple[str, ...] = ()
    num_bytes: Literal[0, 2, 4] = 0
    torch_dtype: str = ""
    product_constant: str = ""
    holds_moments: bool = False
    needs_loss_scale: bool = False
    usual_until: str = ""

    @property
    def is_narrow(self) -> bool:
        """True if only operands of products have this type."""
        return not self.num_bytes


FACTS = (
    NumberType(
        name="float32",
        place=10,
        peak="float32",
        other_names=("fp32",),
        num_bytes=4,
        torch_dtype="float32",
        holds_moments=True,
    ),
    NumberType(
        name="bf16",
        place=20,
        peak="bfloat16",
        other_names=("bfloat16",),
        num_bytes=2,
        torch_dtype="bfloat16",
        holds_moments=True,
    ),
    NumberType(
        name="fp16",
        place=30,
        peak="float16",
        other_names=("float16", "half"),
        num_bytes=2,
        torch_dtype="float16",
        needs_loss_scale=True,
        usual_until="2022-04",  # BLOOM and PaLM (arXiv 2204.02311) trained in bf16
    ),
    NumberType(name="fp8", place=40, peak="float8", other_names=("float8",), product_constant="product8"),
    NumberType(name="mxfp8", place=50, peak="float8", product_constant="product8"),
    NumberType(name="nvfp4", place=60, peak="float4", product_constant="product4"),
)

NUMBER_TYPES: Registry[NumberType] = Registry("a number type", __name__, NumberType)
WideNumber = Annotated[str, NameOf(NUMBER_TYPES, where=lambda number: not number.is_narrow)]
MomentNumber = Annotated[str, NameOf(NUMBER_TYPES, where=lambda number: number.holds_moments)]


def wide_numbers() -> list[NumberType]:
    """The number types of weights and activations, the smallest first."""
    return sorted((number for number in NUMBER_TYPES.values() if number.num_bytes), key=lambda number: number.num_bytes)


def half_numbers() -> list[NumberType]:
    """The number types of 16 bits."""
    return [number for number in wide_numbers() if number.num_bytes == 2]


def narrow_numbers() -> list[NumberType]:
    """The number types that only operands of products have."""
    return [number for number in NUMBER_TYPES.values() if number.is_narrow]


def number_called(text: str) -> str:
    """The number type whose name, or other name, occurs in a text; "" if none does. Narrow ones take precedence, since
    products in them are computed beside wider numbers."""
    candidates = [*reversed(narrow_numbers()), *(number for number in NUMBER_TYPES.values() if number.num_bytes)]
    names = [(name, number.name) for number in candidates for name in (number.name, *number.other_names)]
    return next((number for name, number in names if name in text.lower()), "")
