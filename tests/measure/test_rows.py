"""Rows of measured runs: what a row may say, where its facts come from, and what is wrong with it by its line."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from shardwright.cli.main import cli
from shardwright.config.adapter import TARGETS
from shardwright.config.base import PlanError
from shardwright.config.software import software_of
from shardwright.cost.calibration import shipped
from shardwright.layers.query import Run
from shardwright.measure.measured_runs.run_table import TableLine
from shardwright.measure.measured_runs.runs import measured, read_runs
from shardwright.measure.validate import predict, validate
from shardwright.report.validation_text import write_rows
from shardwright.simulate.closed_form import step_time

TRUTH = Path(__file__).parents[2] / "benchmarks" / "truth"
ROW = {
    "id": "mine-1", "software": "megatron-lm@2025", "layers": "4", "hidden": "1024", "heads": "8", "ffn": "4096",
    "seq": "1024", "vocab": "32000", "gpu": "A100-80G", "gpus": "8", "tp": "2", "pp": "1", "mbs": "1", "gbs": "8",
    "precision": "bf16", "step_time_s": "0.5",
}  # fmt: skip
EXPERTS = {"experts": "8", "topk": "2", "expert_ffn": "512", "sp": "1"}


def table(rows: Sequence[dict[str, str]], header: Sequence[str] = ()) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(
        text, header or list(dict.fromkeys(name for row in rows for name in row)), extrasaction="ignore"
    )
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def faults_of(path: Path, contents: str | bytes) -> list[str]:
    """The faults of a table's rows, each behind its place; of the file if it is no table."""
    path.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    try:
        return [f"{row.where}: {fault}" for row in read_runs(path) for fault in row.faults]
    except PlanError as error:
        return error.faults


def row_faults(row: dict[str, str]) -> list[str]:
    return list(measured(TableLine(2, row)).faults)


def run_of(row: dict[str, str]) -> Run:
    run = measured(TableLine(2, row)).run
    assert run is not None
    return run


@pytest.mark.parametrize(
    ("name", "faulty"),
    [
        *(("runs.csv", ["sc21-023"]), ("oom.csv", []), ("others.csv", [])),
        *(("runs-2026.csv", []), ("playbook.csv", []), ("unseen.csv", []), ("unseen-2.csv", [])),
        *(("unseen-3.csv", []), ("unseen-4.csv", []), ("offload.csv", []), ("own-h200.csv", [])),
        ("unseen-5.csv", ["inf4090-001", "inf4090-002"]),  # their microbatch is not stated
    ],
)
def test_published_runs_have_predictions(name: str, faulty: list[str]) -> None:
    rows = read_runs(TRUTH / name)
    assert all(row.run for row in rows)
    assert [row.id for row in rows if row.faults] == faulty


@pytest.mark.parametrize(
    ("row_fields", "fault"),
    [
        ({"tp": "3", "gpus": "3", "ffn": "4098", "kv_heads": "3"}, "tp 3 does not divide 8 heads (8 / 3 = 2.67)"),
        (
            {"pp": "64", "gpus": "128"},
            "pp 64 x virtual_stages 1 = 64 stages for 4 layers leaves stages without a layer",
        ),
        ({"dp": "2048"}, "dp 2048 x tp 2 x pp 1 = 4,096 ranks, and gpus is 8"),
        ({"tp": "3"}, "tp 3 x pp 1 = 3 ranks, and gpus is 8"),
        ({"recompute": "nonsense"}, "recompute is 'nonsense'; "),
        ({"schedule": "1f2b"}, "schedule is '1f2b'; did you mean 1f1b"),
        ({"precision": "banana"}, "precision is 'banana'; there are: fp32"),
        ({"layers": "-4"}, "layers is '-4'; give a whole number from 1"),
        ({"layers": "1e9"}, "layers = 1000000000: it should be less than or equal to"),
        ({"layers": "4.5"}, "layers is '4.5'; give a whole number"),
        ({"mfu": "0"}, "mfu is '0'; give a number from"),
        ({"mfu": "45"}, "mfu is '45', and it is a share of the peak: write 0.45 for 45 %"),
        ({"step_time_s": "nan"}, "step_time_s is 'nan'; give a number from"),
        ({"head_dim": "999999999999999999999999"}, "head_dim is '999999999999999999999999'; give a whole number"),
        ({"gbs": "7"}, "gbs 7 does not split into dp 4"),
        ({"split_inputs": "2"}, "split_inputs is '2'; give a whole number from 0 to 1,"),
        ({"zero_stage": "4"}, "zero_stage is '4'; give a whole number from 0 to 3"),
        (EXPERTS | {"topk": "9"}, "topk 9 is more than experts 8"),
        (EXPERTS | {"ep": "3"}, "ep 3 does not divide dp 4 x cp 1"),
        (EXPERTS | {"ep": "2", "expert_tp": "8"}, "ep 2 x expert_tp 8 = 16 does not divide dp x cp x tp = 8"),
        ({"ep": "2"}, "ep 2 spreads experts, and experts is 0"),
        ({"cp_method": "rings"}, "cp_method is 'rings'; did you mean ring"),
        ({"offload": "optimizer momenta"}, "offload is 'optimizer momenta'; "),
        ({"offload": "parameters"}, "offload"),
        ({"cp": "3", "cp_method": "ulysses", "gpus": "6", "seq": "1032"}, "ulysses gives each of cp 3 ranks"),
    ],
)
def test_a_row_that_could_not_have_run(row_fields: dict[str, str], fault: str) -> None:
    results = row_faults(ROW | row_fields)
    assert any(one.startswith(fault) for one in results), results


@pytest.mark.parametrize(
    "row_fields",
    [
        {"heads": "16", "kv_heads": "1", "tp": "4", "gpus": "8"},  # held on each rank of tp
        {"heads": "", "tp": "8"},  # what is not said is not checked
        {"layers": "6", "pp": "4", "vp": "2", "schedule": "interleaved", "gbs": "8"},  # the ends without a layer
        EXPERTS | {"ep": "4"},
        EXPERTS | {"tp": "4", "gpus": "8", "expert_tp": "2", "ep": "2"},
        {"shard_group": "2"},
        {"zero_stage": "3", "offload": "optimizer parameters", "cp": "2", "cp_method": "ulysses"},
        {"layers": "", "gpus": ""},  # told where it is predicted
    ],
)
def test_a_row_that_could(row_fields: dict[str, str]) -> None:
    assert row_faults(ROW | row_fields) == []


@given(st.dictionaries(st.sampled_from([*ROW, "notes", "mfu", "vp", "experts"]), st.text(max_size=12), max_size=4))
def test_whatever_a_row_says_is_a_fault_or_a_row(row_fields: dict[str, str]) -> None:
    row = measured(TableLine(2, ROW | row_fields))
    (predicted,) = predict([row], shipped())
    assert predicted.time or predicted.reason


def test_a_plan_has_what_a_row_keeps_on_the_host_and_how_its_ranks_share_sequences() -> None:
    grid = run_of(ROW | {"zero_stage": "3", "offload": "optimizer parameters", "cp": "2", "cp_method": "ulysses"}).grid
    assert (grid.offload_optimizer, grid.offload_parameters, grid.offload_activations) == (1, 1, 0)
    assert grid.trades_heads and not run_of(ROW | {"cp": "2"}).grid.trades_heads


# --- the table ---


def test_every_fault_has_its_line(tmp_path: Path) -> None:
    rows = [
        ROW,
        ROW | {"id": "mine-2", "layers": "-4"},
        ROW | {"id": "mine-3", "notes": "two\nlines"},
        ROW | {"id": "mine-4", "mbs": "x"},
    ]
    result = faults_of(tmp_path / "t.csv", table(rows) + "mine-5,short\n")
    assert result[0].startswith("line 3, mine-2: layers is '-4'")
    assert result[1].startswith("line 6, mine-4: mbs is 'x'")
    assert result[2].startswith("line 7, mine-5: it has 2 fields, and the header")
    many = table([ROW, *(ROW | {"id": f"mine-{n}", "layers": "0"} for n in range(2, 302))])
    assert len(faults_of(tmp_path / "t.csv", many)) == 300
    done = CliRunner().invoke(cli, ["validate", str(tmp_path / "t.csv")])
    assert done.exit_code == 0  # one row is predicted
    assert "1 of 301 rows predicted" in done.output and "... and 280 more; --json lists all" in done.output


PUBLISHED = {
    row["id"]: row for row in csv.DictReader(io.StringIO((TRUTH / "runs.csv").read_text())) if row["id"] in {
        "sc21-002", "sc21-005", "kor22-001", "simumax-001",
    }
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("damage", "fault", "has_prediction"),
    [
        ({"mfu": "0.0"}, "mfu is '0.0'; give a number from 1e-12", True),
        ({"tflops_per_gpu": "0.0", "mfu": ""}, "tflops_per_gpu is '0.0'; give a number", True),
        ({"gpus": "63"}, "dp 32 x tp 2 x pp 1 x cp 1 = 64 ranks, and gpus is 63", True),
        (
            {"schedule": "interleaved", "vp": "7", "pp": "2", "dp": "16"},
            "layers 30 do not divide into pp 2 x vp 7",
            True,
        ),
        ({"schedule": "zb-v", "pp": "2", "dp": "16", "gbs": "496"}, "gbs 496 does not split into dp 16", True),
        ({"heads": "37"}, "hidden 3072 does not split into 37 heads", True),
        ({"mbs": ""}, "it does not say mbs, and mbs 1 is assumed", True),
        ({"gbs": ""}, "it does not say gbs, and one microbatch a replica, gbs 512 is assumed", True),
        ({"layers": "-4"}, "layers is '-4'", False),
        ({"recompute": "some"}, "recompute is 'some'", False),
    ],
)
def test_one_bad_row_is_scored_apart_and_the_others_as_before(
    tmp_path: Path, damage: dict[str, str], fault: str, has_prediction: bool
) -> None:
    good = [row for name, row in PUBLISHED.items() if name != "sc21-002"]
    (tmp_path / "good.csv").write_text(table(good))
    (tmp_path / "all.csv").write_text(table([PUBLISHED["sc21-002"] | damage, *good]))
    alone, together = (validate(tmp_path / f"{name}.csv", None) for name in ("good", "all"))
    assert together["apart"]["faults"][0]["fault"].startswith(fault)
    assert together["apart"]["faults"][0]["where"] == "line 2, sc21-002"
    assert together["apart"]["rows"] == 1
    assert (together["predictions"][0].get("predicted_s", 0) > 0) == has_prediction
    assert together["predictions"][1:] == alone["predictions"]
    assert together["median_ape"] == alone["median_ape"]


def test_of_rows_with_one_id_the_first_counts(tmp_path: Path) -> None:
    rows = list(PUBLISHED.values())
    (tmp_path / "t.csv").write_text(table([*rows, rows[0]]))
    scores = validate(tmp_path / "t.csv", None)
    assert [entry["where"] for entry in scores["apart"]["faults"]] == ["line 6, " + rows[0]["id"]]
    assert scores["predicted"] == len(rows) + 1 and scores["apart"]["rows"] == 1


@pytest.mark.parametrize(
    ("contents", "fault"),
    [
        (
            table([ROW], [name for name in ROW if name != "gpu"]),
            "line 1: the header has no column 'gpu'; did you mean gpus",
        ),
        (table([ROW]) + 'mine-2,"never closed\n', "line 3, without id: a quote that opens here is never closed"),
        (table([ROW | {"source": "x" * 131_073}]), "line 2, without id: a field has more than 131,072 characters"),
        (
            table([ROW]) + "1," * 30 + "\n",
            "line 3, 1: it has 31 fields, and the header 16: there are more than columns",
        ),
        (table([ROW, ROW]), "line 3, mine-1: line 2 has the same id; give one of them another"),
        (table([ROW | {"id": " "}]), "line 2, without id: the row has no id"),
        (
            table([ROW | {"id": "a\x07\u202eb"}]),
            r"line 2, a\x07\u202eb: id 'a\x07\u202eb' has characters that can't be printed",
        ),
        ("", "is not a table of measured runs: it needs a header"),
        ("a,b\n1,2\n", "is not a table of measured runs: it needs a header"),
        (table([]) + "id,layers,hidden,gpu\n", "is a header without rows"),
        (table([ROW]).replace("hidden", "layers", 1), "the column 'layers' stands there twice"),
        (b"id,layers\n\xff", "is not UTF-8 text (byte 10)"),
        (b"id,layers\0\n1,2\n", "line 1"),
    ],
)
def test_what_is_no_table(tmp_path: Path, contents: str | bytes, fault: str) -> None:
    if isinstance(contents, str):
        contents = contents.lstrip("\r\n")
    assert any(fault in one for one in faults_of(tmp_path / "t.csv", contents))


def test_a_byte_order_mark_is_no_column(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(table([ROW]), encoding="utf-8-sig")
    (row,) = read_runs(tmp_path / "t.csv")
    assert row.run is not None and not row.faults


# --- facts ---


def software(**row_fields: str) -> str:
    return run_of(ROW | row_fields).software


def test_a_kernel_of_attention_that_a_column_says() -> None:
    assert software() == "large-2024"
    assert software(attention="fused-softmax") == "large-2024+softmax"
    assert software(attention="flash3") == "large-2024"  # cuDNN's, which it has
    assert software(software="jax@2025-01", attention="fused-softmax") == "xla+softmax"
    assert software(software="nemo", attention="cudnn-fp8") == "nemo+cudnn-float8"


@pytest.mark.parametrize(
    ("column", "name"),
    [
        ("internevo", "internevo"),
        ("megatron-lm@2019-09", "megatron-2019"),
        ("megatron-lm@2020-06", "megatron-2020"),
        ("megatron-lm@2021-04", "megatron-2021"),
        ("deepspeed@2020-12", "deepspeed-2020"),
        ("megatron-llama@2023-09", "megatron-llama"),
        ("deepspeed@2021-04", "deepspeed-2021"),
        ("megatron-lm@2021-12", "megatron-2021-08"),
        ("megatron-lm@2022-11", "flash-2023"),
        ("megatron-lm@2022", "megatron-2022"),
        ("megatron-lm", "large-2024"),
        ("megatron-lm@v0.5", "large-2024"),
        ("megatron-deepspeed@2022-02", "megatron-deepspeed"),
        ("megatron-deepspeed@2023-12", "large-2024"),
        ("jax@2022-04", "xla-2021"),
        ("fsdp@2023-03", "fsdp-2023"),
        ("hai-llm@2024-05", "hai-llm-2024"),
        ("megatron-2022", "megatron-2022"),
    ],
)
def test_software_is_a_generation_of_the_framework_that_a_column_names(column: str, name: str) -> None:
    assert software(software=column) == name


def test_software_that_is_compiled() -> None:
    assert software(software="torchtitan@2024-09") == "torchtitan-2024-03"
    assert software(software="torchtitan@2024-09", compiled="1") == "torchtitan-2024-03-compile"
    assert software(software="torchtitan@2024-12") == "torchtitan"
    assert software(software="torchtitan@2024-12", compiled="1") == "torchtitan-compile"
    assert software(software="torchtitan@2025-06", compiled="1") == "torchtitan-2025"


def test_overlap_that_a_column_says_is_added() -> None:
    assert software(software="megatron-core", overlap="dp a2a") == "megatron-core+overlap-dp+overlap-a2a"
    assert software_of("megatron-core+overlap-dp").reduce_overlap
    assert software(software="nemo", overlap="dp") == "nemo"  # which overlaps it anyway
    assert software(software="nemo", overlap="dp no-a2a") == "nemo+no-overlap-a2a"
    assert not software_of("nemo+no-overlap-a2a").expert_overlap
    assert software(software="megatron-core", overlap="no-dp") == "megatron-core"


def test_dispatchers_and_graphs_that_columns_say() -> None:
    columns = {"software": "megatron-bridge", "dispatcher": "alltoall", "graphs": "step"}
    assert software(**columns) == "megatron-bridge+all-to-all+graphs-step"
    whole, once = (software_of(f"megatron-bridge+{name}") for name in ("all-to-all", "hybridep"))
    assert (whole.rank_dedupe, whole.dispatch) == (False, None)
    assert (once.rank_dedupe, once.dispatch) == (True, software_of("megatron-bridge").dispatch)
    assert software(software="nemo", graphs="parts") == "nemo+graphs-parts"
    small = ROW | {"software": "nemo", "hidden": "256", "heads": "2", "seq": "128", "mbs": "1", "tp": "1", "gbs": ""}
    times = [step_time(run_of(small | {"graphs": graphs}), shipped()) for graphs in ("none", "parts", "step")]
    slow, parts, whole = (time.total - time.other for time in times)
    assert slow > whole + 0.002  # a host launches a kernel in 16 us
    assert parts == pytest.approx(whole, rel=1e-12)  # of a layer without experts all
    assert times[0].other == times[1].other > times[2].other  # the host's part of a step


@pytest.mark.parametrize("plan", [{}, {"tp": "1", "mbs": "2"}, {"pp": "2", "recompute": "full"}])
@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ({"date": "2021-04"}, "megatron-2021"),
        ({"date": "2023-02"}, "flash-2023"),
        ({}, "flash-2023"),  # an A100
        ({"precision": "fp16"}, "megatron-2021"),
        ({"gpu": "H100"}, "large-2024"),
        ({"gpu": "H100", "precision": "fp8"}, "nemo"),
        ({"gpu": "B200"}, "large-2024"),
        ({"gpu": "B200", "precision": "nvfp4"}, "megatron-bridge+graphs-step"),
        ({"gpu": "GB200", "precision": "mxfp8", "date": "2025-06"}, "nemo+graphs-parts"),
        ({"gpu": "MI300X", "precision": "fp8"}, "large-2024"),
        ({"gpu": "V100-32G", "precision": "fp16"}, "megatron-2021"),
        ({"gpu": "TPU v4", "date": "2022-04"}, "xla-2021"),
        ({"software": "abacus@2022-06"}, "megatron-2022"),
        # No run is older than its model: than sequences of 4,096, LLaMA, Llama 2.
        ({"precision": "fp16", "seq": "2048"}, "megatron-2021"),
        ({"precision": "fp16", "seq": "4096"}, "flash-2023"),
        ({"precision": "fp16", "gated_mlp": "1"}, "flash-2023"),
        ({"precision": "fp16", "kv_heads": "2"}, "flash-2023"),
        ({"gpu": "V100-32G", "precision": "fp16", "gated_mlp": "1"}, "flash-2023"),
        ({"gpu": "H100", "gated_mlp": "1"}, "large-2024"),
        ({"date": "2022-04", "gated_mlp": "1"}, "megatron-2021"),  # a month that it states holds
    ],
)
def test_the_usual_software(plan: dict[str, str], columns: dict[str, str], name: str) -> None:
    row = measured(TableLine(2, ROW | {"software": ""} | plan | columns))
    assert row.run is not None and row.run.software == name
    assert not row.knows_software


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ({"zero_stage": "3"}, "fsdp-2023"),
        ({"zero_stage": "3", "gpu": "H100", "precision": "fp8"}, "fsdp-2024"),
        ({"zero_stage": "3", "gpu": "GB200", "precision": "fp8"}, "megatron-bridge+graphs-step"),
        ({"zero_stage": "3", "gpu": "TPU v5p"}, "xla"),
        ({"zero_stage": "1"}, "flash-2023"),
        ({"zero_stage": "1", "precision": "fp16"}, "megatron-deepspeed"),
        ({"zero_stage": "2", "gpu": "V100-32G", "precision": "fp16", "date": "2019-10"}, "deepspeed-2020"),
        ({"zero_stage": "2", "gpu": "V100-32G", "precision": "fp16"}, "deepspeed-2020"),
        ({"gpu": "V100-32G", "precision": "fp16", "date": "2019-10"}, "megatron-2021"),
        ({"sp": "1", "precision": "fp16"}, "megatron-2022"),
        ({"recompute": "selective", "date": "2021-12"}, "megatron-2022"),
    ],
)
def test_usual_software_that_can_run_the_plan(columns: dict[str, str], name: str) -> None:
    assert software(software="", **columns) == name


@pytest.mark.parametrize(
    ("column", "without", "name"),
    [
        ("megatron-lm@2022-06", "megatron-2022", "megatron-2021-08"),  # a month after it began
        ("megatron-lm@2022-08", "megatron-2022", "flash-2023"),  # a month before the next one
        ("megatron-lm@2021-04", "megatron-2021", "megatron-2021-08"),  # the first that is left
        ("megatron-lm", "large-2024", "flash-2023"),
        ("megatron-2022@2022-06", "megatron-2022", "megatron-2021"),
        ("internevo@2023-06", "internevo", "flash-2023"),  # the usual one
    ],
)
def test_a_generation_that_the_catalog_lacks_is_as_the_nearest_one(column: str, without: str, name: str) -> None:
    row = measured(TableLine(2, ROW | {"software": column}), frozenset({without}))
    assert row.run is not None and row.run.software == name
    assert row.knows_software == column.startswith("megatron-lm")


def test_a_loss_whose_logits_no_device_holds_is_by_parts_where_nothing_says_its_software() -> None:
    """8 bytes of each of 128,256 logits of 131,072 tokens are 134 GB, of an H100's 80."""
    long = {"zero_stage": "3", "gpu": "H100", "seq": "131072", "vocab": "128256", "tp": "1", "gated_mlp": "1"}
    assert software(software="", **long) == "fsdp-2024+loss-by-parts"
    assert software(software="", **long | {"seq": "65536"}) == "fsdp-2024"
    assert software(software="", **long | {"gpu": "B200"}) == "fsdp-2024"
    assert software(**long | {"software": "fsdp@2024-10"}) == "fsdp-2024"
    assert software(**long | {"software": "fsdp@2024-10", "loss_by_parts": "1"}) == "fsdp-2024+loss-by-parts"


def test_adapters_that_columns_say() -> None:
    adapters = {"software": "transformers@2024-01", "adapter_rank": "8", "tp": "1", "gated_mlp": "1"}
    all_maps, two = (run_of(ROW | adapters | {"adapter_maps": maps}).shape.adapter for maps in ("", "query value"))
    assert (all_maps.rank, all_maps.targets, all_maps.base) == (8, TARGETS, "compute")
    assert two.targets == ("query", "value")
    stored = run_of(ROW | adapters | {"adapter_base": "nf4-double"}).shape.adapter
    assert stored.base == "nf4" and stored.double_quantization
    assert not run_of(ROW | adapters | {"adapter_rank": ""}).shape.is_adapted
    assert "did you mean query" in row_faults(ROW | adapters | {"adapter_maps": "queri"})[0]
    of_another = measured(TableLine(2, ROW | adapters | {"software": "megatron-core@2025-06"}))
    assert "what megatron-core keeps and computes for adapters is not described here" in of_another.reason


def test_scores_that_no_device_holds_are_those_of_flash_attention() -> None:
    """One layer's scores of 65,536 tokens are 256 GiB with 32 heads; DeepSpeed's software of 2023 keeps them."""
    old = {"software": "deepspeed@2023-07", "attention": "", "heads": "32", "kv_heads": "32", "hidden": "4096"}
    assert software(**old | {"seq": "4096"}) == "deepspeed-2023"
    assert software(**old | {"seq": "65536"}) == "deepspeed-2023+flash2"
    assert software(**old | {"seq": "65536", "attention": "torch"}) == "deepspeed-2023"  # it says so


def test_parameters_without_a_copy_have_gradients_and_moments_in_their_own_numbers() -> None:
    def numbers(**columns: str) -> tuple[int, int, int]:
        grid = run_of(ROW | columns).grid
        return grid.gradient_bytes, grid.reduce_bytes, grid.moment_bytes

    assert numbers() == numbers(masters="fp32") == (0, 0, 0)  # as the software has them
    assert numbers(masters="none") == numbers(masters="none", precision="fp8") == (2, 2, 2)
    assert numbers(masters="none", grads="fp32") == (4, 4, 2)
    assert numbers(masters="none", moments="fp32") == (2, 2, 4)


def test_texts_change_no_prediction() -> None:
    texts = {"notes": "JAX; no FlashAttention; head_dim 64; etp 2; nvidia-smi", "source": "DeepSpeed, 2019"}
    rows = [measured(TableLine(2, ROW | printed)) for printed in (texts, {})]
    assert rows[0].run == rows[1].run and rows[0].sees_device == rows[1].sees_device


def test_a_prediction_without_software_has_a_wider_range() -> None:
    named, unnamed = predict(
        [measured(TableLine(2, ROW | {"software": name})) for name in ("large-2024", "")], shipped()
    )
    widths = [p.range_s[1] / p.range_s[0] for p in (named, unnamed)]
    assert widths[0] < widths[1]


def test_number_types_and_experts_that_columns_say() -> None:
    run = run_of(ROW | EXPERTS | {"expert_tp": "2", "ep": "2", "grads": "bf16", "moments": "bf16"})
    grid = run.grid
    assert (grid.expert_tp, grid.gradient_bytes, grid.reduce_bytes, grid.moment_bytes) == (2, 2, 2, 2)
    assert run_of(ROW | {"layers_run": "2"}).shape.layers == 2


@pytest.mark.parametrize(
    ("name", "precision", "gradient_bytes"),
    [
        ("megatron-deepspeed", "bf16", 4),
        ("megatron-deepspeed", "fp16", 2),
        ("megatron-2022", "bf16", 4),
        ("megatron-2022", "fp16", 2),
        ("megatron-2022", "fp32", 4),  # as parameters are
    ],
)
def test_gradients_are_added_up_in_float32_where_bf16_will_not_do(
    name: str, precision: str, gradient_bytes: int
) -> None:
    from shardwright.cost.calibration import software_under

    run = run_of(ROW | {"software": f"{name}@2022-06", "precision": precision})
    under = software_under(run)
    assert (under.gradient_bytes, under.reduce_bytes) == (gradient_bytes, gradient_bytes)


# --- what is written ---


def test_no_cell_is_a_formula(tmp_path: Path) -> None:
    ids = ["=HYPERLINK(1)", "+1", "-1", "@x", "\tx", "\rx", "plain", "a=b"]
    write_rows(tmp_path / "out.csv", [{"id": one, "error": -0.5, "fits": True} for one in ids])
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == [f"'{one}" for one in ids[:6]] + ids[6:]
    assert {row["error"] for row in rows} == {"-0.5"}  # a number stays one


def test_a_table_of_which_no_row_is_predicted_is_a_failure(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text(table([ROW | {"gpu": "Q100"}]))
    done = CliRunner().invoke(cli, ["validate", str(file)])
    assert done.exit_code == 1
    assert "0 of 1 rows predicted" in done.output and "mine-1: 'Q100' is not in the catalog of devices" in done.output


def test_a_message_changes_nothing_of_the_terminal() -> None:
    printed = str(PlanError("job a\x1b[31m\u202e", ["name 'b\x07' and\ntwo lines \ud800"]))
    assert printed == "job a\\x1b[31m\\u202e: 1 fault\n  1. name 'b\\x07' and\ntwo lines \\ud800"


def test_routing_that_a_column_says() -> None:
    for routing in ("forced", "biased", "balanced", "free"):
        assert run_of(ROW | EXPERTS | {"routing": routing}).shape.mixture.routing == routing
    assert run_of(ROW | EXPERTS).shape.mixture.routing == "forced"
    assert "routing is 'uneven'" in measured(TableLine(2, ROW | EXPERTS | {"routing": "uneven"})).faults[0]
