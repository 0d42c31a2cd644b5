"""Measured runs as other planners' input: `benchmarks/planners`, without the planners themselves."""

import importlib
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shardwright.layers.query import Run
from shardwright.measure.measured_runs.runs import Measured, read_runs

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@cache  # and not when tests are collected, which each process of the suite does
def rows() -> dict[str, Measured]:
    """The measured runs by their ids."""
    return {row.id: row for row in read_runs(BENCHMARKS / "truth" / "runs.csv")}


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The adapters by name: they are scripts beside one another."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "planners"))
    return importlib.import_module


def run_of(row: Measured) -> Run:
    """The run that a row is about."""
    assert row.run is not None
    return row.run


def test_calculon_gets_the_file_that_it_ships_for_a_published_run(adapters: Any) -> None:
    """MT-NLG 530B with sequence parallelism: validation/seqsel/tab5/turing-530B_seqsel.json and its model file.

    Theirs has data parallelism, of which there is none, on the network instead of in the node.
    """
    calculon = adapters("to_calculon")
    run = run_of(rows()["kor22-006"])
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
    cut_sequence, full = (calculon.execution_of(run_of(rows()[name])) for name in ("kor22-006", "kor22-005"))
    assert {key: value for key, value in full.items() if value != cut_sequence[key]} == {
        "activation_recompute": "full", "tensor_par_comm_type": "ar", "seq_par_ag_redo": False,
    }  # fmt: skip
    run = run_of(rows()["kor22-005"])
    for change in ({"sequence_parallel": True}, {"recompute": "none"}):
        assert not calculon.execution_of(replace(run, grid=replace(run.grid, **change)))["seq_par_ag_redo"]


@pytest.mark.parametrize(
    ("tp", "dp", "pp", "nets"), [(8, 1, 1, "000"), (4, 2, 2, "001"), (4, 4, 1, "011"), (16, 1, 2, "111")]
)
def test_groups_cross_the_network_where_they_leave_the_node(
    adapters: Any, tp: int, dp: int, pp: int, nets: str
) -> None:
    """tp, dp and pp on networks 0 (in a node of 8) or 1; ranks are counted along tp, then dp, then pp."""
    run = run_of(rows()["sc21-004"])
    grid = replace(run.grid, tp=tp, dp=dp, pp=pp)
    result = adapters("to_calculon").execution_of(replace(run, grid=grid))
    assert "".join(str(result[f"{axis}_par_net"]) for axis in ("tensor", "data", "pipeline")) == nets


def test_what_cannot_be_said_is_listed_in_full(adapters: Any) -> None:
    """A row of Llama with FlashAttention on H100, in fp8, over a part of the replicas: every reason, not the first."""
    run = run_of(rows()["sc21-004"])
    assert adapters("to_calculon").faults_of(run) == adapters("to_llm_analysis").faults_of(run) == []
    shape = replace(run.shape, gated=True, kv_heads=8)
    grid = replace(run.grid, precision="fp8", cp=2, zero=3, zero_ranks=4, recompute="matmul")
    other = replace(run, shape=shape, grid=grid, device="h200-sxm", software="megatron-core")
    calculon = "; ".join(adapters("to_calculon").faults_of(other))
    both = ("h200", "context", "part of the replicas", "fp8", "operator")
    for word in (*both, "grouped-query", "gated", "cudnn", "ZeRO-3"):
        assert word in calculon
    llm_analysis = "; ".join(adapters("to_llm_analysis").faults_of(other))
    for word in both:
        assert word in llm_analysis
    assert "gated" not in llm_analysis and "grouped" not in llm_analysis
    simumax = "; ".join(adapters("to_simumax").faults_of(other))
    for word in (*both, "ZeRO-3"):
        assert word in simumax
    for word in ("gated", "grouped", "cudnn"):
        assert word not in simumax
    with pytest.raises(ValueError, match=r"gated MLP; .*; no fp8"):
        adapters("answer").refuse(adapters("to_calculon").faults_of(other))


def test_rows_reach_the_planners_with_the_whole_world_and_batch(adapters: Any) -> None:
    """Every row that a planner takes: its degrees multiply to the devices, its microbatches to the batch."""
    calculon, llm_analysis, simumax = (adapters(f"to_{name}") for name in ("calculon", "llm_analysis", "simumax"))
    taken = 0
    for row in rows().values():
        if row.run is None:
            continue
        run, grid = row.run, row.run.grid
        if not calculon.faults_of(run):
            printed = calculon.execution_of(run)
            assert (
                printed["num_procs"]
                == printed["tensor_par"] * printed["pipeline_par"] * printed["data_par"]
                == grid.world
            )
            assert printed["batch_size"] % (printed["data_par"] * printed["microbatch_size"]) == 0
            taken += 1
        if not llm_analysis.faults_of(run):
            degrees = llm_analysis.parallelism_of(run)
            assert degrees["tp_size"] * degrees["pp_size"] * degrees["dp_size"] == grid.world
            model = llm_analysis.model_of(run)
            # Both matrices of its MLP hold what the row's two or three hold.
            mlp = 2 * model["hidden_dim"] * model["ffn_embed_dim"]
            assert mlp == pytest.approx(sum(m.num_elements for m in run.shape.mlp_matrices), rel=1e-3)
            taken += 1
        if not simumax.faults_of(run):
            printed = simumax.strategy_of(run)
            dp = printed["world_size"] // (printed["tp_size"] * printed["pp_size"])
            assert printed["world_size"] == grid.world and dp == grid.dp
            assert printed["micro_batch_size"] * printed["micro_batch_num"] * dp == grid.global_batch
            taken += 1
    assert taken > 900


def test_a_system_keeps_its_efficiencies_and_takes_the_links_of_the_row(adapters: Any) -> None:
    """Bandwidths and the size of a node are the row's; what the tool ships is not changed."""
    shipped = {
        "mem1": {"GiB": 80, "GBps": 2048},
        "networks": [
            {"bandwidth": 300, "size": 8, "efficiency": 0.65},
            {"bandwidth": 25, "size": 65536, "efficiency": 0.9},
        ],
    }
    run = replace(run_of(rows()["sc21-004"]), devices_per_node=4, node_bytes_per_s=0.0, network_bytes_per_s=12.5e9)
    result = adapters("to_calculon").system_of(run, shipped)
    assert result["networks"] == [
        {"bandwidth": 300, "size": 4, "efficiency": 0.65},
        {"bandwidth": 12.5, "size": 65536, "efficiency": 0.9},
    ]
    assert result["mem1"]["GBps"] == 2048
    assert shipped["networks"][1]["bandwidth"] == 25 and shipped["mem1"]["GiB"] == 80


def test_simumax_gets_the_strategy_of_its_own_run(adapters: Any) -> None:
    """llama3_70b_l12_tp1_pp2_dp4_mbc4_cef on B200: told so, it answers with the 828.76 ms that its authors print."""
    simumax = adapters("to_simumax")
    run = run_of(rows()["simumax-001"])
    assert simumax.faults_of(run) == []
    assert simumax.model_of(run) == {
        "hidden_size": 8192, "head_num": 64, "kv_head_num": 8, "head_size": 128, "intermediate_size": 28672,
        "layer_num": 12, "vocab_size": 128256, "use_swiglu": True,
    }  # fmt: skip
    assert simumax.strategy_of(run) == {
        "seq_len": 4096, "micro_batch_size": 1, "micro_batch_num": 4, "dtype": "bf16", "world_size": 8, "tp_size": 1,
        "pp_size": 2, "interleaving_size": 1, "enable_sequence_parallel": False, "zero_state": 1,
        "pp_comm_async": False, "enable_recompute": False, "recompute_granularity": None, "recompute_layer_num": 0,
        "use_flash_sdp": True, "use_math_sdp": False, "use_fused_norm": True, "use_fused_swiglu": True,
        "cross_entropy_loss_fusion": True, "grad_reduce_in_bf16": False, "te_version": "2.11.0",
    }  # fmt: skip


def test_simumax_gets_what_the_software_fuses_keeps_and_computes_again(adapters: Any) -> None:
    """MT-NLG 530B computes the scores again; with full recomputation every layer; eager kernels are not fused."""
    strategy_of = adapters("to_simumax").strategy_of
    selective, full = (strategy_of(run_of(rows()[name])) for name in ("kor22-006", "kor22-005"))
    assert {key: (value, full[key]) for key, value in selective.items() if value != full[key]} == {
        "enable_sequence_parallel": (True, False), "recompute_granularity": ("sdp_only", "full_block"),
    }  # fmt: skip
    assert selective["recompute_layer_num"] == 105 and selective["interleaving_size"] == 3
    assert (selective["use_flash_sdp"], selective["use_math_sdp"]) == (False, True)
    assert selective["grad_reduce_in_bf16"] and not selective["cross_entropy_loss_fusion"]
    run = run_of(rows()["kor22-006"])
    eager, fused = (strategy_of(replace(run, software=name)) for name in ("aleph-flash2", "aleph-flash2-rms"))
    assert (eager["use_fused_norm"], fused["use_fused_norm"]) == (False, True)
    assert eager["use_flash_sdp"] and not eager["use_fused_swiglu"]


def test_simumax_gets_links_measured_on_nvlink_and_a_bandwidth_by_node(adapters: Any) -> None:
    """Of an A100 its own operators; its links are those of the file for B200 at the run's bandwidth."""
    own = {"bandwidth": {"gbps": 25, "efficient_factor": 0.6}}
    shipped = {
        "num_per_node": 8, "accelerator": {"op": {}, "bandwidth": {"gbps": 2039, "latency_us": 40}},
        "networks": {"low_intra_node": own, "high_intra_node": own, "inter_node": own},
    }  # fmt: skip
    link = {"bandwidth": {"gbps": 900.0, "efficient_factor": 1.0}}
    nvlink = {"networks": {"low_intra_node": link, "high_intra_node": link}}
    run = replace(run_of(rows()["sc21-004"]), devices_per_node=4, node_bytes_per_s=300e9, network_bytes_per_s=12.5e9)
    result = adapters("to_simumax").system_of(run, shipped, nvlink)
    assert result["accelerator"]["bandwidth"] == {"default": {"gbps": 2039, "latency_us": 40}}
    assert result["networks"]["high_intra_node"] == {"bandwidth": {"gbps": 300.0, "efficient_factor": 1.0}}
    assert result["networks"]["inter_node"] == {"bandwidth": {"gbps": 50.0, "efficient_factor": 0.6}}
    assert result["num_per_node"] == 4
    assert own["bandwidth"]["gbps"] == 25 and link["bandwidth"]["gbps"] == 900.0
    assert "gbps" in shipped["accelerator"]["bandwidth"]


STUB = """
class Config(dict):
    @classmethod
    def init_from_dict(cls, fields):
        return cls(fields)

StrategyConfig = ModelConfig = SystemConfig = Config

class PerfLLM:
    def configure(self, strategy, model, system):
        assert strategy["tp_size"] == 1, "one rank; tp is 8"
    def run_estimate(self):
        print("padded")
    def analysis_cost(self):
        return {"duration_time_per_iter": "%s"}
    def analysis_mem(self):
        return {"first": 3e9, "last": 2e9}
    def get_pp_stage_peak_mem(self, memory, key):
        return memory if key == "peak_mem" else {}
"""


@pytest.mark.parametrize(("printed", "step_s"), [("828.7645 ms", 0.8287645), ("1.4412 s", 1.4412)])
def test_simumax_answers_in_seconds_of_the_fullest_stage(
    adapters: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, printed: str, step_s: float
) -> None:
    """It prints times and sizes with units of its choice; what it refuses is a reason, in one piece."""
    core, systems = tmp_path / "simumax" / "core", tmp_path / "configs" / "system"
    core.mkdir(parents=True)
    systems.mkdir(parents=True)
    (core / "config.py").write_text(STUB % printed, encoding="utf-8")
    (core / "perf_llm.py").write_text("from simumax.core.config import PerfLLM", encoding="utf-8")
    node = '{"bandwidth": {"gbps": 1}}'
    for name in ("a100_bf16", "b200_bf16_ceperm"):
        text = f'{{"accelerator": {{"bandwidth": {{}}}}, "networks": {{"low_intra_node": {node}, '
        text += f'"high_intra_node": {node}, "inter_node": {node}}}}}'
        (systems / f"{name}.json").write_text(text, encoding="utf-8")
    for name in ("simumax", "simumax.core", "simumax.core.config", "simumax.core.perf_llm"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    planner = adapters("to_simumax").SimuMax(tmp_path)
    answer = planner.answer(run_of(rows()["simumax-001"]))
    assert (answer.step_s, answer.memory_gb) == (pytest.approx(step_s), 3.0)
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match=r"^SimuMax refuses it: one rank, tp is 8$"):
        planner.answer(run_of(rows()["simumax-004"]))


def test_what_simumax_publishes_has_the_errors_that_it_prints(adapters: Any) -> None:
    """All runs of its family, and the errors of its own table: -8.97 % and -0.42 %, -13.54 % and -0.50 %."""
    lines = adapters("lines")
    published = lines.read_published(lines.PUBLISHED_ROWS)
    assert set(published) == {name for name, row in rows().items() if row.family == lines.PUBLISHED_FAMILY}
    for name, time_error, memory_error in (("simumax-004", -8.97, -0.42), ("simumax-021", -13.54, -0.50)):
        line = lines.Line(rows()[name], {"theirs": published[name]})
        assert 100 * line.error("theirs") == pytest.approx(time_error, abs=0.006)
        assert 100 * line.memory_error("theirs") == pytest.approx(memory_error, abs=0.02)


def test_errors_weigh_families_alike(adapters: Any) -> None:
    """One row that is 30 % off in a family of one, and two exact ones in another: 15 % on average, not 10 %."""
    module, answer = adapters("lines"), adapters("answer")
    lines = []
    for name, ratio in (("kor22-001", 1.3), ("sc21-001", 1.0), ("sc21-002", 1.0)):
        row = rows()[name]
        lines.append(module.Line(row, {"theirs": answer.Answer(row.step_s * ratio, 0.0)}))
    assert module.error_cells(lines, [line.error("theirs") for line in lines]) == "15.0 / 0.0 (+15.0)"
    assert lines[0].is_answered(["theirs"])


def test_simumax_gives_memory_alone_of_a_device_without_a_system_file(
    adapters: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory depends on no device; a plan that it can't express has none."""
    simumax, answer = adapters("to_simumax"), adapters("answer")

    class Estimated:
        """Bytes of a stage, and no time."""

        def analysis_mem(self) -> None:
            """Nothing: the peak is below."""

        def get_pp_stage_peak_mem(self, memory: None, key: str) -> dict[str, float]:
            """The peak of the one stage."""
            return {"first": 3e9}

    planner = object.__new__(simumax.SimuMax)
    monkeypatch.setattr(simumax.SimuMax, "_estimated", lambda self, run: Estimated())
    run = replace(run_of(rows()["simumax-001"]), device="h100-sxm")
    assert planner.answer(run) == answer.Answer(0.0, 3.0, "no system file for h100-sxm")
    with pytest.raises(ValueError, match=r"^no system file for h100-sxm; no ZeRO-3"):
        planner.answer(replace(run, grid=replace(run.grid, zero=3)))


def test_megatrons_formula_gives_the_bytes_of_its_terms(adapters: Any) -> None:
    """GPT 22B on 8 devices, tp 8 with sequence parallelism and selective recomputation (`kor22-002`): 18 bytes a
    parameter, (18 h + 4 f) bytes of activations a token and layer, and logits in float32."""
    formula = adapters("formulas").MegatronFormula()
    run = run_of(rows()["kor22-002"])
    shape, grid = run.shape, run.grid
    assert (grid.tp, grid.pp, grid.virtual, grid.recompute) == (8, 1, 1, "selective") and shape.vocab % 1024 == 0
    width, tokens, table = shape.hidden, shape.sequence * grid.microbatch, shape.vocab * shape.hidden
    layer = 12 * width**2 + 4 * width  # the formula has weights and biases of both norms, and no other biases
    parameters = (shape.layers * layer + 2 * width + table) / 8
    activations = tokens * (shape.layers * (18 * width + 4 * shape.ffn) + 8 + width + 4 * (width + shape.vocab)) / 8
    answer = formula.answer(run)
    assert (answer.step_s, answer.memory_gb) == (0.0, pytest.approx((18 * parameters + activations) / 1e9, rel=1e-12))
    for change, limit in (({"recompute": "full"}, "whole layers"), ({"zero": 3}, "ZeRO-3"), ({"cp": 2}, "context")):
        with pytest.raises(ValueError, match=limit):
            formula.answer(replace(run, grid=replace(grid, **change)))


def test_the_textbook_divides_what_zero_divides_and_adds_the_bubble(adapters: Any) -> None:
    """16 bytes a parameter, 4 + 12/dp under ZeRO 1, 16/dp under ZeRO 3; a pipeline adds (p - 1) / m of the time."""
    textbook = adapters("formulas").Textbook()
    run = run_of(rows()["sc21-001"])
    one = replace(run.grid, dp=4, global_batch=64, microbatch=1)
    by_zero = [textbook._model_bytes(replace(run, grid=replace(one, zero=zero))) for zero in (0, 1, 3)]
    assert [num_bytes / by_zero[0] for num_bytes in by_zero] == pytest.approx([1.0, 7 / 16, 1 / 4])
    pipeline = replace(one, dp=1, pp=4, schedule="1f1b")
    flat = replace(pipeline, pp=1, dp=4)
    with_bubble, without = (textbook.answer(replace(run, grid=grid)).step_s for grid in (pipeline, flat))
    assert with_bubble / without == pytest.approx(1 + 3 / 64)


def test_verdicts_count_plans_that_ran_and_plans_that_ran_out(adapters: Any) -> None:
    """One of two that ran is refused, and the one that ran out passes: one verdict of three is right."""
    module, measures, answer = adapters("lines"), adapters("measures"), adapters("answer")
    verdicts = (("sc21-001", "runs", True), ("sc21-002", "runs", False), ("sc21-003", "oom", True))
    lines = [
        module.Line(rows()[name], {"theirs": answer.Answer(1.0, 1.0, fits=fits)}, table)
        for name, table, fits in verdicts
    ]
    assert measures._fit_cell(lines, "theirs") == "33.3 % (1 of 2, 1 of 1)"


def test_layers_of_stages_stay_untold(adapters: Any) -> None:
    """No table has them: they are nanotron's, by a description of ours."""
    row = rows()["sc21-005"]
    run = run_of(row)
    divided = replace(row, run=replace(run, grid=replace(run.grid, layout=(1, 2))))

    class Planner:
        """A planner that answers with the number of stages whose layers it is told."""

        def answer(self, run: Run) -> Any:
            """The number of stages, as seconds."""
            return adapters("answer").Answer(float(len(run.grid.layout)), 1.0)

    assert adapters("answer").asked(Planner(), divided).step_s == 0.0
