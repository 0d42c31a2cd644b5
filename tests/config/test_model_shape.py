"""The table of a layer's matrices: as the runtime makes them, as counts follow, and that there is no second one."""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardwright
from shardwright.config.attention_sections import LatentSpec
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.model import ModelSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.moe import MoeSpec
from shardwright.model.decoder import DecoderStage, stage_span
from shardwright.parallel.comm.collectives import Axis
from shardwright.parallel.comm.ledger import Ledger
from shardwright.parallel.tensor.linear import LayerSharding
from shardwright.sharding.stage_parameters import num_parameters
from support.cases import ATTENTIONS, EXPERTS, KINDS

SOURCE = Path(shardwright.__file__).parent


def job_of(kind: str) -> JobSpec:
    """A small job of a kind, on one rank."""
    kinds = KINDS | ATTENTIONS | EXPERTS
    return make_job(
        {"model": {"layers": 2, "hidden": 32, "heads": 8, "vocab": 61, "sequence": 16} | kinds[kind], "plan": {}}
    )


@pytest.mark.parametrize("kind", [*KINDS, *ATTENTIONS, *EXPERTS])
def test_the_runtime_has_these_matrices(kind: str) -> None:
    job, cpu = job_of(kind), torch.device("cpu")
    alone = LayerSharding.of_tp(Axis("tp", (0,), 0, None, Ledger(cpu), None), False)
    regions = DecoderStage(job.model, stage_span(job.plan, job.model.layers, 0), alone).prepare(cpu, torch.float32)
    shape, num_matrices = shape_of(job.model), 0
    for layer in range(shape.layers):
        made = [p.place for p in regions.regions()[str(layer)] if p.place.init == "normal"]
        matrices = shape.matrices("dense" if shape.is_dense(layer) else "experts")
        assert Counter(m.full_shape for m in matrices) == Counter(place.full_shape for place in made)
        routed = sum(place.num_elements for place in made if place.is_expert)
        assert sum(m.num_elements for m in matrices if m.experts) == routed
        num_matrices += sum(place.num_elements for place in made) - routed
        num_matrices += routed * job.model.moe.num_chosen // max(1, job.model.moe.experts)
    assert shape.matrix_parameters == num_matrices + job.model.vocab * job.model.hidden


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """Models without what `ModelShape.parameters` leaves out: biases, and norms inside of attention."""
    heads = draw(st.sampled_from([2, 4, 6]))
    moe = MoeSpec(
        experts=draw(st.integers(4, 9)), ffn=draw(st.integers(0, 40)), shared_experts=draw(st.integers(0, 2)),
        first_dense=draw(st.integers(0, 2)), every=draw(st.integers(1, 3)),
    )  # fmt: skip
    return ModelSpec(
        layers=draw(st.integers(3, 7)), hidden=12 * draw(st.integers(1, 5)), heads=heads,
        kv_heads=draw(st.sampled_from([0, 1, 2])), head_dim=draw(st.integers(0, 8)), ffn=draw(st.integers(0, 50)),
        gated_mlp=draw(st.booleans()), positions=draw(st.sampled_from(["rotary", "learned"])),
        tied_embeddings=draw(st.booleans()), vocab=draw(st.integers(2, 99)),
        norm_weight=draw(st.booleans()), norm_place=draw(st.sampled_from(["before", "after", "around"])),
        embedding_norm=draw(st.booleans()), position_offset=draw(st.integers(0, 2)),
        moe=moe if draw(st.booleans()) else MoeSpec(),
    )  # fmt: skip


@given(models())
def test_the_parameters_of_the_shape_are_those_listed_one_by_one(model: ModelSpec) -> None:
    assert shape_of(model).parameters == num_parameters(model)


@given(models(), st.booleans(), st.integers(1, 8))
def test_a_rank_has_its_share_of_what_is_cut(model: ModelSpec, is_latent: bool, tp: int) -> None:
    """Where degrees divide what they cut, the parts of all ranks are the whole; a router is on each."""
    shape = shape_of(model.model_copy(update={"latent": LatentSpec(kv_rank=7, q_rank=5)}) if is_latent else model)
    for matrix in (m for kind in ("dense", "experts") for m in shape.matrices(kind)):
        inner, columns = matrix.inner_on(tp), matrix.columns_on(tp)
        cut = (*matrix.outputs, matrix.inner)[matrix.sharded_dim or 0]
        assert matrix.sharded_dim is None or cut % tp or tp * inner * columns == matrix.inner * matrix.columns
        assert matrix.sharded_dim is not None or (inner, columns) == (matrix.inner, matrix.columns)


def test_there_is_no_second_table() -> None:
    """How many matrices an MLP has, and products of widths, are written in one file; modules have their own shapes."""
    counts = re.compile(
        r"\b[23] if [\w.]*gated\w* else|[12] if [\w.]*tied\w* else|vocab\s*\*\s*[\w.]*hidden|hidden\s*\*\s*[\w.]*vocab"
        r"|hidden\s*\*\s*[\w.]*(ffn|head|rank)|\brank\s*\*\s*[\w.]*heads"
    )
    result = {
        f"{file.relative_to(SOURCE)}: {line.strip()}"
        for file in SOURCE.rglob("*.py")
        if file.relative_to(SOURCE).parts[0] != "model" and file.name != "model_shape.py"
        for line in file.read_text(encoding="utf-8").splitlines()
        if counts.search(line)
    }
    assert result == set()
