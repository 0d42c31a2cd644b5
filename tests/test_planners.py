"""Measured runs as other planners' input: `benchmarks/planners`, without the planners themselves."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwright.measure.runs import Measured, read_runs
from shardwright.workload.shape import Run

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
ROWS = {row.id: row for row in read_runs(BENCHMARKS / "truth" / "runs.csv")}


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The adapters by name: they are scripts beside one another."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "planners"))
    return importlib.import_module


def run_of(row: Measured) -> Run:
    """What a row is about."""
    assert row.run is not None
    return row.run


def test_calculon_gets_the_file_that_it_ships_for_a_published_run(adapters: Any) -> None:
    """MT-NLG 530B with sequence parallelism: validation/seqsel/tab5/turing-530B_seqsel.json and its model file.

    Theirs has data parallelism, of which there is none, on the network instead of in the node.
    """
    calculon = adapters("to_calculon")
    run = run_of(ROWS["kor22-006"])
    assert calculon.faults_of(run) == []
    assert calculon.application_of(run) == {
        "hidden": 20480, "feedforward": 81920, "seq_size": 2048, "attn_heads": 128, "attn_size": 160,
        "num_blocks": 105,
    }  # fmt: skip
    assert calculon.execution_of(run) == {
        "num_procs": 280, "tensor_par": 8, "pipeline_par": 35, "data_par": 1, "tensor_par_net": 0,
        "pipeline_par_net": 1, "data_par_net": 0, "batch_size": 280, "microbatch_size": 1, "datatype": "float16",
        "fused_activation": False, "attention_type": "multihead", "activation_recompute": "attn_only",
        "pipeline_interleaving": 3, "optimizer_sharding": False, "tensor_par_comm_type": "rs_ag",
        "tensor_par_overlap": "none", "seq_par_ag_redo": True, "data_par_overlap": False, "weight_offload": False,
        "activations_offload": False, "optimizer_offload": False, "training": True,
    }  # fmt: skip


def test_calculon_reduces_whole_activations_where_the_sequence_is_not_cut(adapters: Any) -> None:
    """The same model with everything computed again: all-reduces and nothing gathered twice, as in ..._full.json."""
    calculon = adapters("to_calculon")
    cut_sequence, full = (calculon.execution_of(run_of(ROWS[name])) for name in ("kor22-006", "kor22-005"))
    assert {key: value for key, value in full.items() if value != cut_sequence[key]} == {
        "activation_recompute": "full", "tensor_par_comm_type": "ar", "seq_par_ag_redo": False,
    }  # fmt: skip
    run = run_of(ROWS["kor22-005"])
    for change in ({"sequence_parallel": True}, {"recompute": "none"}):
        assert not calculon.execution_of(replace(run, cut=replace(run.cut, **change)))["seq_par_ag_redo"]


@pytest.mark.parametrize(
    ("tp", "dp", "pp", "nets"), [(8, 1, 1, "000"), (4, 2, 2, "001"), (4, 4, 1, "011"), (16, 1, 2, "111")]
)
def test_groups_cross_the_network_where_they_leave_the_node(
    adapters: Any, tp: int, dp: int, pp: int, nets: str
) -> None:
    """tp, dp and pp on networks 0 (in a node of 8) or 1; ranks are counted along tp, then dp, then pp."""
    run = run_of(ROWS["sc21-004"])
    cut = replace(run.cut, tp=tp, dp=dp, pp=pp)
    found = adapters("to_calculon").execution_of(replace(run, cut=cut))
    assert "".join(str(found[f"{axis}_par_net"]) for axis in ("tensor", "data", "pipeline")) == nets


def test_what_cannot_be_said_is_listed_in_full(adapters: Any) -> None:
    """A row of Llama with FlashAttention on H100, in fp8, over a part of the replicas: every reason, not the first."""
    run = run_of(ROWS["sc21-004"])
    assert adapters("to_calculon").faults_of(run) == adapters("to_llm_analysis").faults_of(run) == []
    shape = replace(run.shape, gated=True, kv_heads=8)
    cut = replace(run.cut, precision="fp8", cp=2, zero=3, zero_ranks=4, recompute="matmul")
    other = replace(run, shape=shape, cut=cut, device="h200-sxm", software="megatron-core")
    calculon = "; ".join(adapters("to_calculon").faults_of(other))
    both = ("h200", "context", "part of the replicas", "fp8", "operator")
    for word in (*both, "grouped-query", "gated", "cudnn", "ZeRO-3"):
        assert word in calculon
    llm_analysis = "; ".join(adapters("to_llm_analysis").faults_of(other))
    for word in both:
        assert word in llm_analysis
    assert "gated" not in llm_analysis and "grouped" not in llm_analysis
    with pytest.raises(ValueError, match=r"gated MLP; .*; no fp8"):
        adapters("answer").refuse(adapters("to_calculon").faults_of(other))


def test_rows_reach_the_planners_with_the_whole_world_and_batch(adapters: Any) -> None:
    """Every row that a planner takes: its degrees multiply to the devices, its microbatches to the batch."""
    calculon, llm_analysis = adapters("to_calculon"), adapters("to_llm_analysis")
    taken = 0
    for row in ROWS.values():
        if row.run is None:
            continue
        run, cut = row.run, row.run.cut
        if not calculon.faults_of(run):
            said = calculon.execution_of(run)
            assert said["num_procs"] == said["tensor_par"] * said["pipeline_par"] * said["data_par"] == cut.world
            assert said["batch_size"] % (said["data_par"] * said["microbatch_size"]) == 0
            taken += 1
        if not llm_analysis.faults_of(run):
            degrees = llm_analysis.parallelism_of(run)
            assert degrees["tp_size"] * degrees["pp_size"] * degrees["dp_size"] == cut.world
            model = llm_analysis.model_of(run)
            # Both matrices of its MLP hold what the row's two or three hold.
            mlp = 2 * model["hidden_dim"] * model["ffn_embed_dim"]
            assert mlp == pytest.approx(run.shape.mlp_parameters(run.shape.ffn), rel=1e-3)
            taken += 1
    assert taken > 600


def test_a_system_keeps_its_efficiencies_and_takes_the_links_of_the_row(adapters: Any) -> None:
    """Bandwidths and the size of a node are the row's; what the tool ships is not changed."""
    shipped = {
        "mem1": {"GiB": 80, "GBps": 2048},
        "networks": [
            {"bandwidth": 300, "size": 8, "efficiency": 0.65},
            {"bandwidth": 25, "size": 65536, "efficiency": 0.9},
        ],
    }
    run = replace(run_of(ROWS["sc21-004"]), devices_per_node=4, node_bytes_per_s=0.0, network_bytes_per_s=12.5e9)
    found = adapters("to_calculon").system_of(run, shipped)
    assert found["networks"] == [
        {"bandwidth": 300, "size": 4, "efficiency": 0.65},
        {"bandwidth": 12.5, "size": 65536, "efficiency": 0.9},
    ]
    assert found["mem1"]["GBps"] == 2048
    assert shipped["networks"][1]["bandwidth"] == 25 and shipped["mem1"]["GiB"] == 80


def test_errors_weigh_families_alike(adapters: Any) -> None:
    """One row that is 30 % off in a family of one, and two exact ones in another: 15 % on average, not 10 %."""
    compare, answer = adapters("compare"), adapters("answer")
    lines = []
    for name, ratio in (("kor22-001", 1.3), ("sc21-001", 1.0), ("sc21-002", 1.0)):
        row = ROWS[name]
        lines.append(compare.Line(row, {"theirs": answer.Answer(row.step_s * ratio, 0.0)}))
    assert compare.error_cells(lines, "theirs", compare.Line.error) == "15.0 / 0.0 (+15.0)"
    assert lines[0].is_answered(["theirs"])
