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
from shardwright.config import catalog
from shardwright.config.base import PlanError
from shardwright.config.software import software_of
from shardwright.measure.measured_runs.row_checks import row_faults
from shardwright.measure.measured_runs.row_facts import with_facts
from shardwright.measure.measured_runs.runs import measured, read_runs
from shardwright.measure.measured_runs.software_inference import attention_in
from shardwright.report.validation_text import write_rows

TRUTH = Path(__file__).parents[2] / "benchmarks" / "truth"
ROW = {
    "id": "mine-1", "source": "ours, Megatron-LM, 2025", "layers": "4", "hidden": "1024", "heads": "8", "ffn": "4096",
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
    path.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    with pytest.raises(PlanError) as error:
        read_runs(path)
    return error.value.faults


@pytest.mark.parametrize("name", ["runs.csv", "oom.csv", "others.csv"])
def test_no_published_run_is_refused(name: str) -> None:
    assert all(row.run for row in read_runs(TRUTH / name))


@pytest.mark.parametrize(
    ("said", "fault"),
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
        ({"precision": "banana"}, "precision is 'banana'; there are: nvfp4"),
        ({"layers": "-4"}, "layers is '-4'; give a whole number from 1"),
        ({"layers": "1e9"}, "layers = 1000000000: it should be less than or equal to"),
        ({"layers": "4.5"}, "layers is '4.5'; give a whole number"),
        ({"mfu": "0"}, "mfu is '0'; give a number from"),
        ({"mfu": "45"}, "mfu is '45', and it is a share of the peak: write 0.45 for 45 %"),
        ({"step_time_s": "nan"}, "step_time_s is 'nan'; give a number from"),
        ({"notes": "head_dim 999999999999999999999999"}, "head_dim is '999999999999999999999999'; give a whole number"),
        ({"gbs": "7"}, "gbs 7 does not split into dp 4"),
        ({"zero_stage": "4"}, "zero_stage is '4'; give a whole number from 0 to 3"),
        (EXPERTS | {"topk": "9"}, "topk 9 is more than experts 8"),
        (EXPERTS | {"ep": "3"}, "ep 3 does not divide dp 4 x cp 1"),
        (EXPERTS | {"ep": "2", "expert_tp": "8"}, "ep 2 x expert_tp 8 = 16 does not divide dp x cp x tp = 8"),
        ({"ep": "2"}, "ep 2 spreads experts, and experts is 0"),
    ],
)
def test_a_row_that_could_not_have_run(said: dict[str, str], fault: str) -> None:
    found = row_faults(with_facts(ROW | said))
    assert any(one.startswith(fault) for one in found), found


@pytest.mark.parametrize(
    "said",
    [
        {"heads": "16", "kv_heads": "1", "tp": "4", "gpus": "8"},  # held on each rank of tp
        {"heads": "", "tp": "8"},  # what is not said is not checked
        {"layers": "6", "pp": "4", "vp": "2", "schedule": "interleaved", "gbs": "8"},  # the ends without a layer
        EXPERTS | {"ep": "4"},
        EXPERTS | {"tp": "4", "gpus": "8", "expert_tp": "2", "ep": "2"},
        {"shard_group": "2"},
        {"layers": "", "gpus": ""},  # told where it is predicted
    ],
)
def test_a_row_that_could(said: dict[str, str]) -> None:
    assert row_faults(with_facts(ROW | said)) == []


@given(st.dictionaries(st.sampled_from([*ROW, "notes", "mfu", "vp", "experts"]), st.text(max_size=12), max_size=4))
def test_whatever_a_row_says_is_a_fault_or_a_row(said: dict[str, str]) -> None:
    row = ROW | said
    if not row_faults(with_facts(row)):
        assert measured(row).run or measured(row).reason


# --- the table ---


def test_every_fault_has_its_line(tmp_path: Path) -> None:
    rows = [
        ROW,
        ROW | {"id": "mine-2", "layers": "-4"},
        ROW | {"id": "mine-3", "notes": "two\nlines"},
        ROW | {"id": "mine-4", "mbs": "x"},
    ]
    found = faults_of(tmp_path / "t.csv", table(rows) + "mine-5,short\n")
    assert found[0].startswith("line 7, mine-5: it has 2 fields, and the header")
    assert found[1].startswith("line 3, mine-2: layers is '-4'")
    assert found[2].startswith("line 6, mine-4: mbs is 'x'")
    many = table([ROW | {"id": f"mine-{n}", "layers": "0"} for n in range(300)])
    assert len(faults_of(tmp_path / "t.csv", many)) == 300
    text = str(CliRunner().invoke(cli, ["validate", str(tmp_path / "t.csv")]).exception)
    assert "300 faults" in text and "... and 280 more" in text and text.count("\n") == 21


@pytest.mark.parametrize(
    ("contents", "fault"),
    [
        (
            table([ROW], [name for name in ROW if name != "gpu"]),
            "line 1: the header has no column 'gpu'; did you mean gpus",
        ),
        (table([ROW]) + 'mine-2,"never closed\n', "line 3: a quote that opens here is never closed"),
        (table([ROW | {"source": "x" * 131_073}]), "line 2: a field has more than 131,072 characters"),
        (
            table([ROW]) + "1," * 30 + "\n",
            "line 3, 1: it has 31 fields, and the header 16: there are more than columns",
        ),
        (table([ROW, ROW]), "line 3, mine-1: line 2 has the same id; give one of them another"),
        (table([ROW | {"id": " "}]), "line 2: the row has no id"),
        (table([ROW | {"id": "a\x07\u202eb"}]), r"line 2: id 'a\x07\u202eb' has characters that can't be printed"),
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
    assert row.run is not None


# --- facts ---


@pytest.mark.parametrize(
    ("said", "kernel"),
    [
        ("no flash attention", "none"), ("without FlashAttention-2", "none"),
        ("did not yet use flash_attention", "none"),
        ("FlashAttention not used", "none"), ("flash attention: off", "none"), ("non-flash-attention", "none"),
        ("w/o FlashAttention", "none"), ("FlashAttention = False", "none"), ("flash attention disabled; tp 2", "none"),
        ("FlashAttention", "flash1"), ("flash_attention2", "flash2"), ("FlashAttention v3", "cudnn"),
        ("FlashAttention; no sequence parallel", "flash1"), ("no dropout with FlashAttention", "flash1"),
        ("FlashAttention-2, arXiv 2307.08691: no FlashAttention", "none"), ("not sharded; flash attention 2", "flash2"),
        ("fused softmax", ""),
    ],
)  # fmt: skip
def test_attention_in_prose(said: str, kernel: str) -> None:
    assert attention_in(said) == kernel


def software(**said: str) -> str:
    run = measured(ROW | said).run
    assert run is not None
    return run.software


def test_a_sweep_without_flash_attention_is_priced_without() -> None:
    assert software() == "large-2024"
    assert software(notes="no flash attention") == "large-2024+softmax"
    assert software(notes="no flash attention", attention="flash2") == "large-2024+flash2"  # a column holds
    assert software(attention="torch") == "large-2024+torch"
    assert software(source="JAX, 2025", attention="fused-softmax") == "xla+softmax"


def test_software_is_read_from_its_column() -> None:
    assert software(software="internevo") == "internevo"
    assert software(software="megatron-lm@2021-04") == "megatron-2022"
    assert software(software="jax") == "xla"
    assert software(software="fsdp@2023-03", notes="Megatron-DeepSpeed is slower") == "fsdp-2023"


def test_every_pattern_of_software_can_match() -> None:
    """A backslash too many in a literal string of TOML makes a pattern that nothing has."""
    assert software(source="JAX on GPUs") == "xla"
    for name in catalog.names("software"):
        assert not any("\\\\" in pattern for pattern in software_of(name).matches), name


def test_facts_come_from_columns_before_notes() -> None:
    notes = "head_dim 64; MLA q_lora 96, kv_lora 32; etp 2; zero1=4"
    row = with_facts(ROW | {"notes": notes, "head_dim": "256", "expert_tp": "1"})
    assert [row[name] for name in ("head_dim", "q_rank", "kv_rank", "expert_tp", "shard_group")] == [
        "256", "96", "32", "1", "4",
    ]  # fmt: skip
    run = measured(ROW | EXPERTS | {"expert_tp": "2", "ep": "2", "grads": "bf16"}).run
    assert run is not None
    assert (run.grid.expert_tp, run.grid.gradient_bytes, run.grid.reduce_bytes) == (2, 2, 2)


@pytest.mark.parametrize(
    ("source", "precision", "gradient_bytes"),
    [("Megatron-DeepSpeed", "bf16", 4), ("Megatron-DeepSpeed", "fp16", 2), ("arXiv 2205.05198", "bf16", 4)],
)
def test_gradients_are_added_up_in_float32_where_bf16_will_not_do(
    source: str, precision: str, gradient_bytes: int
) -> None:
    from shardwright.cost.calibration import software_under

    run = measured(ROW | {"source": source, "precision": precision}).run
    assert run is not None
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
    said = str(PlanError("job a\x1b[31m\u202e", ["name 'b\x07' and\ntwo lines \ud800"]))
    assert said == "job a\\x1b[31m\\u202e: 1 fault\n  1. name 'b\\x07' and\ntwo lines \\ud800"
