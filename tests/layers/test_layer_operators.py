"""The one list of a layer's operators: it holds together, both wings read it, and there is no second one."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwright
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.model_shape import ModelShape, shape_of
from shardwright.config.recompute_policy import NEEDS, OPERATORS
from shardwright.config.section_shapes import ExpertShape, LatentShape
from shardwright.config.software import software_of
from shardwright.layers.chains import chains
from shardwright.layers.layer_operators import by_recompute_unit, piece_operators
from shardwright.layers.layer_tensors import BLOCK, LayerTensor, TensorSizes
from shardwright.layers.query import PlanGrid
from shardwright.memory.activations import layer_of
from support.cases import ATTENTIONS, BLOCKS, EXPERT_BLOCKS, EXPERTS, KINDS

SOURCE = Path(shardwright.__file__).parent
LIST = "layers/layer_operators.py"


def job_of(kind: str) -> JobSpec:
    """A small job of a kind, on one rank."""
    kinds = KINDS | ATTENTIONS | EXPERTS | BLOCKS | EXPERT_BLOCKS
    return make_job(
        {"model": {"layers": 2, "hidden": 32, "heads": 8, "vocab": 61, "sequence": 16} | kinds[kind], "plan": {}}
    )


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    experts = ExpertShape(
        num=draw(st.sampled_from([8, 24])), topk=draw(st.integers(1, 3)), ffn=8 * draw(st.integers(1, 9)),
        shared_ffn=8 * draw(st.integers(0, 3)), weighs_input=draw(st.booleans()),
    )  # fmt: skip
    latent = LatentShape(8 * draw(st.integers(0, 4)), 16, 8, 8, 8 * draw(st.integers(1, 2)))
    return ModelShape(
        4, 64, 8, draw(st.sampled_from([1, 4, 8])), 16, 8 * draw(st.integers(1, 20)), draw(st.booleans()), 512, 256,
        experts=experts if draw(st.booleans()) else None, latent=latent if draw(st.booleans()) else None,
    )  # fmt: skip


def kinds_of(shape: ModelShape) -> tuple[str, ...]:
    return ("dense", "experts") if shape.experts else ("dense",)


@pytest.mark.parametrize("kind", [*KINDS, *ATTENTIONS, *EXPERTS, *BLOCKS, *EXPERT_BLOCKS])
def test_each_matrix_is_in_one_operator(kind: str) -> None:
    shape = shape_of(job_of(kind).model)
    for layer in kinds_of(shape):
        operators = piece_operators(shape, layer)
        assert Counter(p.matrix for o in operators for p in o.products) == Counter(shape.matrices(layer))
        assert len({o.name for o in operators}) == len(operators)


@given(shapes())
def test_an_operator_takes_what_another_one_gave(shape: ModelShape) -> None:
    for layer in kinds_of(shape):
        there: set[LayerTensor] = {BLOCK.input}
        for operator in piece_operators(shape, layer):
            assert operator.takes in there, operator.name
            there.add(operator.gives)
        assert operator.gives is BLOCK.output


@given(shapes())
def test_policies_name_parts_of_the_list(shape: ModelShape) -> None:
    """Every name that a policy knows is a part, and the operator that it must be recomputed with is the next one."""
    parts = [part for part, _ in by_recompute_unit(piece_operators(shape, "dense"))]
    assert set(OPERATORS) <= set(parts)
    for product, follower in NEEDS.items():
        assert parts[parts.index(product) + 1] == follower
    for layer in kinds_of(shape):
        assert set(OPERATORS) <= {o.recompute_unit for o in piece_operators(shape, layer)}


@given(shapes(), st.sampled_from([1, 2, 4, 8]), st.integers(1, 3), st.booleans())
def test_sizes_of_numbers_are_those_of_arrays(shape: ModelShape, tp: int, microbatch: int, is_sharded: bool) -> None:
    """Whole numbers remain so, and what a prediction has for several plans at once is the same."""
    tokens = shape.sequence * microbatch
    here = tokens // tp if is_sharded else tokens
    rows = tokens * (shape.experts.topk if shape.experts else 0)
    exact = TensorSizes(
        shape, tp=tp, expert_tp=tp, tokens=tokens, tokens_here=here, routed=here, sent=rows, arrived=rows
    )
    tps = np.array([tp, 1])
    plans = PlanGrid(
        tp=tps, expert_tp=tps, microbatch=np.array([microbatch, 1]), sequence_parallel=np.array([is_sharded, False])
    )
    costed = chains(shape, plans, software_of("megatron-core"))
    for layer in kinds_of(shape):
        for operator in costed[layer]:
            size = exact[operator.layer_operator.gives]
            assert isinstance(size, int)
            if np.any(operator.given):
                assert np.broadcast_to(operator.given, 2)[0] == 2 * size, operator.name


@pytest.mark.parametrize("kind", [*KINDS, *ATTENTIONS, *EXPERTS, *BLOCKS, *EXPERT_BLOCKS])
def test_the_account_has_the_parts_of_the_list(kind: str) -> None:
    job = job_of(kind)
    shape = shape_of(job.model)
    for number in range(job.model.layers):
        layer = "dense" if shape.is_dense(number) else "experts"
        parts = [part for part, _ in by_recompute_unit(piece_operators(shape, layer)) if part != "join"]
        assert [part.name for chain in layer_of(job, number).chains for part in chain] == parts


def strings(file: Path) -> set[str]:
    """All short texts of a file by themselves."""
    return set(re.findall(r'"([^"\n]*)"', file.read_text(encoding="utf-8")))


def test_there_is_no_second_list() -> None:
    """Of the names of operators many stand together in the list, and where each is costed."""
    shape = shape_of(job_of("deepseek").model)
    names = {o.name for kind in ("dense", "experts") for o in piece_operators(shape, kind)}
    several = {str(f.relative_to(SOURCE)) for f in SOURCE.rglob("*.py") if len(names & strings(f)) > len(OPERATORS) + 2}
    assert several == {LIST, "layers/chains.py"}


def test_the_size_of_a_tensor_is_written_once() -> None:
    """Tokens times a width of the model: in one file, but for what passes between stages."""
    formula = re.compile(r"\b(tokens\w*|arrived|sent)\s*\*.*\b(hidden|inner|ffn|ffn_size|\w+_width|shared_size)\b")
    result = {
        f"{file.relative_to(SOURCE)}: {line.strip()}"
        for folder in ("memory", "layers", "cost", "explain", "planner", "simulate")
        for file in (SOURCE / folder).rglob("*.py")
        if file.name not in ("layer_tensors.py", "zero_replay.py")
        for line in file.read_text(encoding="utf-8").splitlines()
        if formula.search(line)
    }
    assert result == set()
