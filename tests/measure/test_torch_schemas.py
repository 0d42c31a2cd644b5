"""Private and fused operators have the schemas that this package calls them by, in the oldest torch that it allows and
in the newest one that it is tested with."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwright
from measure.test_kernel_demands import NAMES, real_calls

DATA = tomllib.loads((Path(__file__).parents[1] / "support" / "torch_schemas.toml").read_text())
SCHEMAS: dict[str, str] = DATA["schemas"]
SOURCES = sorted(Path(shardwright.__file__).parent.rglob("*.py"))
CALL = re.compile(r"torch\.ops\.aten\.(\w+(?:\.\w+)?)\(|torch\.(_(?:fused|foreach|scaled|grouped)\w+)")
LOOKED_UP = re.compile(r'"(_scaled_dot_product_\w+)"')


def parsed(text: str) -> Any:
    return torch._C.parse_schema(f"aten::{text}")


def forms(schema: Any) -> list[tuple[object, ...]]:
    """Arguments and results; sizes that may be symbols are integers to those who call."""
    arguments = [
        (a.name, str(a.type), a.kwarg_only, a.has_default_value(), str(a.default_value)) for a in schema.arguments
    ]
    return [*arguments, *((str(result.type),) for result in schema.returns)]


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_installed_torch_has_the_same_schema(name: str) -> None:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    assert forms(operator._schema) == forms(parsed(SCHEMAS[name]))


def test_every_operator_that_is_called_has_a_schema_here() -> None:
    names = set[str]()
    for source in SOURCES:
        text = source.read_text()
        names |= {one or other for one, other in CALL.findall(text)} | set(LOOKED_UP.findall(text))
    packets = {name.partition(".")[0] for name in SCHEMAS}
    assert len(names) > 12
    assert {name.partition(".")[0] for name in names} - packets == set()
    assert {name.removeprefix("aten::") for name in NAMES if name.startswith("aten::")} <= SCHEMAS.keys()


@pytest.mark.long
def test_calls_fit_the_schemas() -> None:
    """Every recorded call gives all that has no default, and nothing that is unknown."""
    calls = {name.removeprefix("aten::"): given for name, given in real_calls().items() if name.startswith("aten::")}
    assert {"_scaled_mm_v2", "_scaled_grouped_mm_v2", "_foreach_norm.Scalar", "addmm.dtype_out"} < calls.keys()
    for name, given in calls.items():
        arguments = parsed(SCHEMAS[name]).arguments
        needed = {argument.name for argument in arguments if not argument.has_default_value()}
        for call in given:
            assert needed <= call.keys() <= {argument.name for argument in arguments}
