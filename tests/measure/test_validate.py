"""`shardwright validate` on the published runs: its headline figures hold, and scores are right."""

import csv
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import chdir
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shardwright.cli.main import cli
from shardwright.config import catalog
from shardwright.config.base import PlanError
from shardwright.config.toml_text import toml_text
from shardwright.cost import calibration
from shardwright.cost.calibration import shipped
from shardwright.cost.communicators import process_bytes
from shardwright.cost.prediction_range import FACTS
from shardwright.layers.query import Run
from shardwright.measure.cluster_fit import fit_cluster
from shardwright.measure.fit_scores import fit_scores
from shardwright.measure.measured_runs.row_facts import COLUMNS
from shardwright.measure.measured_runs.run_table import TableLine
from shardwright.measure.measured_runs.runs import Measured, measured, read_runs
from shardwright.measure.measured_runs.score import kendall_tau, percentile, share_within, weights_of
from shardwright.measure.measured_runs.sweeps import RankedPlan, ranking_quality
from shardwright.measure.number_counts import DERIVED, number_counts, numbers_used
from shardwright.measure.unstated_columns import unstated_columns
from shardwright.measure.validate import headline_of, headline_scores, predict
from shardwright.measure.validate import validate as validate_table
from shardwright.memory.rank_estimate import peak_memory
from shardwright.report.validation_text import validation_text
from shardwright.simulate.batch_pricing import prices
from support.languages import assert_same_in_chinese
from support.ranks import PATIENCE_S

ROOT = Path(__file__).parents[2]
TRUTH = ROOT / "benchmarks" / "truth"
MEASURED_RUNS = ROOT / "docs" / "measured-runs.md"
# The README shows it. It predicts each published run, and so it is run once, here.
PUBLISHED = "shardwright validate benchmarks/truth/runs.csv"
TODAY = {
    "id": "mine-1", "software": "megatron-lm", "layers": "4", "hidden": "1024", "ffn": "4096", "seq": "1024",
    "gpu": "A100-80G", "gpus": "8", "gpus_per_node": "8", "tp": "2", "pp": "1", "mbs": "1", "gbs": "8",
    "precision": "bf16", "step_time_s": "0.5",
}  # fmt: skip


@cache
def published() -> list[Measured]:
    return read_runs(TRUTH / "runs.csv")


def run_of(row: dict[str, str]) -> Run:
    run = measured(TableLine(2, row)).run
    assert run is not None
    return run


def validate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardwright", "validate", *arguments]
    whole_lines = os.environ | {"COLUMNS": "10000"}
    return subprocess.run(
        command, cwd=ROOT, env=whole_lines, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def scored(*arguments: str) -> Result:
    """The same in this process, of a table that is one."""
    with chdir(ROOT):
        return CliRunner().invoke(cli, ["validate", *arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def validation(tmp_path_factory: pytest.TempPathFactory) -> dict:
    out = tmp_path_factory.mktemp("validate") / "rows.csv"
    done = scored(*shlex.split(PUBLISHED)[2:], "--json", "--out", str(out))
    assert (done.exit_code, done.stderr) == (0, "")
    with out.open() as file:
        return json.loads(done.stdout) | {"lines": list(csv.DictReader(file))}


def test_a_table_is_not_written_over(tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    text = ",".join(TODAY) + "\n" + ",".join(f'"{value}"' for value in TODAY.values()) + "\n"
    table.write_text(text)
    done = validate(str(table), "--out", str(table))
    assert done.returncode == 2
    assert "is a table that is read, and would be lost; name another file" in done.stderr
    beside = tmp_path / "oom.csv"  # read too, where it lies there
    beside.write_text(text)
    assert validate(str(table), "--out", str(beside)).returncode == 2
    assert table.read_text() == beside.read_text() == text
    beside.unlink()
    done = scored(str(table))
    assert done.exit_code == 0
    assert "Memory, where" not in done.stdout  # no row says what it had
    (row,) = (line.split() for line in done.stdout.splitlines() if re.match(rf"{TODAY['id']} +[0-9.]+ ", line))
    assert float(row[-1]) == pytest.approx(float(row[1]) / float(row[3]), rel=0.01)  # in seconds, each beside its unit


def fitted(by_family: dict, figure: str) -> list[float]:
    """A figure of each family but simumax, to which nothing is fitted (benchmarks/fit_costs.py)."""
    return [family[figure] for name, family in by_family.items() if name != "simumax"]


def test_headline_figures(validation: dict) -> None:
    assert validation["predicted"] == validation["rows"] == 720
    assert validation["median_ape"] <= 0.045
    within = fitted(validation["by_family"], "within_15_percent")
    assert sum(within) / len(within) >= 0.9
    assert validation["median_ape"] < validation["baseline"]["median_ape"] / 3
    assert all(error <= 0.065 for error in fitted(validation["by_family"], "median_ape"))
    assert validation["by_family"]["simumax"]["median_ape"] <= 0.2
    assert validation["memory_mape"] <= 0.03
    b200 = validation["memory_by_family"]["simumax"]  # of the allocator, on every rank
    assert b200["mape"] <= 0.005
    assert abs(b200["mean_error_gb"]) <= 0.1
    assert validation["fit"]["accuracy"] >= 0.95
    apart = validation["fit"]["contradicted"]  # of two entries of software, and of one
    assert (apart["aleph-070"], apart["aleph-785"], len(apart)) == ("aleph-116", "aleph-948", 5)
    numbers = validation["numbers"]
    assert numbers["fitted"] <= 12 and numbers["fitted_to_one_family"] == 0
    assert numbers["by_hand"] >= numbers["by_hand_in_software"] >= numbers["software_of_one_family"] > 0


def test_a_few_rows_are_shown_one_by_one(validation: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    line = {"id": "mine", "measured_s": 9.0, "predicted_s": 11.25, "low_s": 10.5, "high_s": 12.9}
    unpriced = {"id": "other", "measured_s": 1.0, "reason": "no plan"}
    shown = validation_text(validation, "en", [line, unpriced])
    assert re.search(r"^mine +9 s +11.2 s +10.5 s and 12.9 s +0.80$", shown, re.MULTILINE) and "other " not in shown
    assert "measured by predicted" not in validation_text(validation, "en", [line] * 13)
    assert_same_in_chinese(lambda language: validation_text(validation, language, [line]), monkeypatch)


def test_scores_are_the_same_in_chinese(validation: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same_in_chinese(lambda language: validation_text(validation, language), monkeypatch)


def test_docs_have_the_counts(validation: dict) -> None:
    text = " ".join(MEASURED_RUNS.read_text().split())
    counts = validation["numbers"]
    for printed in (
        f"Fitted constants: {counts['fitted']},",
        f"{counts['fitted_to_one_family']} of them change the steps of one family alone",
        f"{counts['by_hand']} numbers are set by hand, {counts['by_hand_in_software']} of these in descriptions",
        f"{counts['software_of_one_family']} in such that one family alone has",
        f"{counts['counted']} more are counted from the operators of the software itself",
    ):
        assert printed in text, printed


@pytest.mark.parametrize(
    ("table", "num_rows"),
    [
        *(("playbook.csv", 284), ("runs-2026.csv", 40), ("unseen.csv", 47), ("unseen-2.csv", 87)),
        *(("unseen-3.csv", 31), ("unseen-4.csv", 65), ("unseen-5.csv", 164), ("unseen-6.csv", 35)),
        *(("unseen-7.csv", 106), ("unseen-8.csv", 70), ("unseen-9.csv", 102), ("unseen-10.csv", 104)),
        *(("unseen-11.csv", 36), ("unseen-12.csv", 57), ("adapters.csv", 24), ("others.csv", 99)),
    ],
)
def test_docs_have_the_errors_of_runs_to_which_nothing_is_fitted(table: str, num_rows: int) -> None:
    scores = headline_scores(headline_of(predict(read_runs(TRUTH / table), shipped())))
    lines = MEASURED_RUNS.read_text().splitlines()
    line = next(line for line in lines if line.startswith(f"| {table} "))
    assert sum(family["rows"] for family in scores["by_family"].values()) == num_rows
    assert f"| {num_rows} | {100 * scores['median_ape']:.1f} % | {100 * scores['bias']:.1f} % |" in line
    if table != "adapters.csv":
        line = next(line for line in lines if line.startswith(f"| {table.removesuffix('.csv')} "))
        assert f"| {100 * scores['in_range']:.0f} % |" in line


def test_numbers_behind_predictions_are_counted() -> None:
    """The same fitted constants in each of the catalog's files about them."""
    fitted = catalog.read_fitted()
    assert {name for constants in catalog.read_left_out().values() for name in constants} == set(fitted)
    assert min(map(len, fitted.values())) > 1 and len(fitted["common.memory"]) > 5
    assert set(fitted) <= set(shipped())
    rows = published()
    fewer = [row for row in rows if row.family in ("zb", "kor22")]
    assert number_counts(fewer)["software_of_one_family"] < number_counts(rows)["software_of_one_family"]


def test_numbers_that_predictions_of_a_table_can_use_are_told_from_those_of_others() -> None:
    """Each number that is not said to be used leaves every prediction as it is."""
    rows = [row for row in published() if row.family == "zb" and row.run]
    counts = number_counts(rows)
    told = {name: number_counts(read_runs(TRUTH / name))["by_hand_in_table"] for name in ("runs.csv", "playbook.csv")}
    docs = (ROOT / "docs" / "measured-runs.md").read_text(encoding="utf-8")
    assert f"Of all {counts['by_hand']}, `validate` says" in docs
    assert f": {told['runs.csv']} for these" in docs and f"{told['playbook.csv']} for `playbook.csv`" in docs
    assert counts["by_hand_in_table"] < counts["by_hand"] / 4 and counts["fitted_in_table"] <= counts["fitted"]
    runs = [row.run for row in rows if row.run]
    used = {".".join(place[1:]) for place in numbers_used(set(runs)) if place[0] == "constant"}
    constants = shipped()
    used |= {f"common.{name}" for name in DERIVED}  # the range
    changed = {name: value if name in used else 1.1 * value for name, value in constants.items()}
    assert len(used) < len(constants) / 2
    assert prices(runs, constants) == prices(runs, changed)


def test_the_range_holds_about_four_of_five_runs_of_each_table_to_which_nothing_was_fitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Families weigh alike; runs of which no fact makes a prediction less sure are as many below as above."""
    monkeypatch.syspath_prepend(TRUTH.parent)
    from fit_range import OUTSIDE, OWN, SHOWN, TABLES, UNSEEN, misses, share_held, unseen_misses

    every_miss = [*misses([OWN]), *unseen_misses()]
    low, high = (math.log(shipped()[f"common.{end}"]) for end in ("low", "high"))
    spreads = {fact: shipped()[f"common.{fact}_range"] for fact in FACTS}
    tables = [name for name in (*TABLES, *UNSEEN, SHOWN) if name != "unseen-3.csv"]
    shares = [share_held([miss for miss in every_miss if miss.table == name], low, high, spreads) for name in tables]
    assert len(every_miss) > 900 and all(0.77 <= share <= 0.9 for share in shares), shares
    usual = [miss for miss in every_miss if miss.table in TABLES and miss.facts.keys() <= {"host"}]
    weight = sum(miss.weight for miss in usual)
    for outside in ([m for m in usual if m.log_ratio < low], [m for m in usual if m.log_ratio > high]):
        assert sum(miss.weight for miss in outside) / weight == pytest.approx(OUTSIDE, abs=1 / weight)


def test_families_left_out(validation: dict) -> None:
    crossed = validation["cross_validated"]
    assert set(crossed["by_family"]) == set(validation["by_family"])
    assert validation["median_ape"] < crossed["median_ape"] <= 0.07
    for harder, most in (("software_left_out", 0.1), ("software_blind", 0.08)):
        assert crossed["median_ape"] < validation[harder]["median_ape"] <= most
    generations = validation["generations_left_out"]
    assert generations["by_generation"].keys() == {"ampere", "blackwell", "hopper"}
    assert validation["median_ape"] < generations["median_ape"] <= 0.06
    assert all(error <= 0.1 for error in fitted(crossed["by_family"], "median_ape"))


def test_order_within_sweeps(validation: dict) -> None:
    assert validation["order"]["zb"]["kendall_tau"] >= 0.85
    assert validation["order"]["aleph"]["kendall_tau"] >= 0.75
    assert all(validation["order"][family]["regret"] <= 0.04 for family in ("aleph", "bloom", "zb"))
    assert validation["order_with_tier_b"]["bloom"]["sweeps"] > validation["order"]["bloom"]["sweeps"]


def test_every_row_is_written_with_its_parts(validation: dict) -> None:
    assert len(validation["lines"]) == 720
    line = next(line for line in validation["lines"] if line["id"] == "sc21-010")
    assert float(line["predicted_s"]) == pytest.approx(102.66, rel=0.1)
    assert float(line["bubble_s"]) == pytest.approx(63 / (512 + 63) * float(line["predicted_s"]), rel=0.15)


def test_a_table_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    rows = [TODAY, TODAY | {"id": "mine-2", "gpu": "abacus"}, TODAY | {"id": "mine-3", "hidden": ""}]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(TODAY))
        writer.writeheader()
        writer.writerows(rows)
    done = scored(str(path), "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    scores = json.loads(done.stdout)
    assert (scores["rows"], scores["predicted"]) == (3, 1)
    assert "'abacus' is not in the catalog of devices" in scores["not_predicted"]["mine-2"]
    assert scores["not_predicted"]["mine-3"] == "the row does not say hidden"
    assert "1 of 3 rows predicted" in scored(str(path)).stdout


def test_a_run_that_took_longer_than_its_range_is_told_where_to_look(tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"

    def told(step_s: str) -> str:
        row = TODAY | {"step_time_s": step_s}
        table.write_text(f"{','.join(row)}\n{','.join(row.values())}\n")
        return " ".join(scored(str(table)).stdout.split())

    slow = told("50")
    parts = re.search(r"mine-1 took longer than its range\. Its step was predicted to be (.*?)\. No prediction", slow)
    assert parts and "computing" in parts[1]
    assert 90 <= sum(map(int, re.findall(r"(\d+) %", parts[1]))) <= 101
    assert "`shardwright learn troubleshooting`" in slow and "took longer" not in told("0.001")


def test_a_table_without_a_measurement_is_refused_with_the_columns_that_have_one(tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    unmeasured = {name: value for name, value in TODAY.items() if name not in ("step_time_s", "peak_mem_gb")}

    def written(column: str) -> str:
        row = unmeasured | {column: "2500"}
        table.write_text(f"{','.join(row)}\n{','.join(row.values())}\n")
        return str(table)

    meant = "tokens_per_s_per_gpu for tokens_per_s, perhaps"
    with pytest.raises(PlanError, match=rf"no row says what was measured; .*: {meant}"):
        scored(written("tokens_per_s"))
    assert scored(written("tokens_per_s_per_gpu")).exit_code == 0


def test_a_file_that_is_no_table(tmp_path: Path) -> None:
    path = tmp_path / "no.csv"
    path.write_text("a,b\n1,2\n")
    done = validate(str(path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "is not a table of measured runs" in done.stderr


def test_what_columns_say_is_read() -> None:
    rows = {row.id: row for row in published()}
    latent = rows["mbridge-002"].run.shape.latent
    assert (latent.query_rank, latent.key_rank) == (1536, 512)
    assert rows["intern-016"].run.grid.zero_ranks == 8
    assert rows["intern-008"].run.grid.zero_ranks == 0
    assert rows["titan-001"].run.device == "h100-hbm2e-96g"
    assert rows["mbridge-196"].run.grid.policies.count("full") == 5
    assert rows["titan-003"].run.software == "torchtitan-compile"
    assert rows["aleph-845"].run.software == "aleph-flash2-rms"
    assert rows["sc21-010"].step_s == pytest.approx(102.7, rel=0.01)  # from hardware TFLOP/s


def test_a_row_may_leave_out_what_has_a_sensible_reading() -> None:
    printed = {
        "gpu": "V100 32GB",
        "precision": "",
        "schedule": "Interleaved 1F1B",
        "pp": "2",
        "tp": "1",
        "gpus_per_node": "",
    }
    run = run_of(TODAY | printed)
    assert (run.grid.precision, run.grid.schedule, run.grid.virtual) == ("fp16", "interleaved-1f1b", 2)
    assert run.devices_per_node == 8
    assert run_of(TODAY | {"gpu": "TPU v4", "gpus_per_node": "4"}).devices_per_node == 4096
    assert run_of(TODAY | {"gpu": "RTX 4090", "gpus_per_node": "", "gpus": "4"}).devices_per_node == 4


def test_a_device_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new device and its efficiencies are two TOML files and no code."""
    folder = tmp_path / "catalog"
    shutil.copytree(Path(catalog.__file__).parent, folder)
    text = (folder / "devices" / "a100-sxm-80g.toml").read_text()
    text = text.replace('"ampere"', '"abacus"').replace('"A100-80G", "A100"', '"ABACUS-1"')
    (folder / "devices" / "abacus-1.toml").write_text(text)
    (folder / "calibrations" / "abacus.toml").write_text("product = 0.4\nattention_flash2 = 0.3\n")
    monkeypatch.setattr(catalog, "resources", SimpleNamespace(files=lambda _: folder))
    caches = (calibration.shipped, calibration.device_of, catalog._names)
    for kept in caches:
        kept.cache_clear()
    try:
        from shardwright.simulate.closed_form import step_time

        large = TODAY | {"hidden": "8192"}  # small layers take as long as their host
        new, old = (run_of(large | {"gpu": gpu}) for gpu in ("abacus 1", "A100-80G"))
        assert new.device == "abacus-1"
        assert step_time(new, calibration.shipped()).compute > 1.2 * step_time(old, calibration.shipped()).compute
    finally:
        for kept in caches:
            kept.cache_clear()


# --- scores ---


def test_weights() -> None:
    rows = [SimpleNamespace(family=family, group=group) for family, group in ("a1", "a1", "a2", "b3")]
    assert weights_of(rows) == [0.125, 0.125, 0.25, 0.5]


def test_weighted_percentiles() -> None:
    values, weights = [3.0, 1.0, 2.0], [0.5, 0.3, 0.2]
    assert percentile(values, weights, 0.5) == 2.0
    assert percentile(values, weights, 0.6) == 3.0
    assert share_within(values, weights, 2.0) == pytest.approx(0.5)


def test_kendall_tau() -> None:
    assert kendall_tau([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert kendall_tau([1, 2, 3, 4], [4, 3, 2, 1]) == -1
    assert kendall_tau([1, 2, 3], [1, 3, 2]) == pytest.approx(1 / 3)


def test_regret_of_plans_expected_to_be_equally_good_is_their_mean() -> None:
    """A planner that sees no difference picks none: not the one that happens to stand first."""
    row = next(row for row in published() if row.family == "aleph")
    assert row.run is not None
    runs = [replace(row.run, grid=replace(row.run.grid, microbatch=number)) for number in (1, 2, 4, 8)]
    seconds = (10.0, 11.0, 12.0, 15.0)
    sweep = [replace(row, run=run, step_s=step_s) for run, step_s in zip(runs, seconds, strict=True)]

    def scores(plans: list[RankedPlan]) -> tuple[float, float, float]:
        (score,) = ranking_quality(plans).values()
        assert score["sweeps"] == 1 and score["median_regret"] == score["worst_regret"] == score["regret"]
        return score["kendall_tau"], score["regret"], score["worst_regret"]

    assert scores([RankedPlan(row, 1.0) for row in sweep]) == (0.0, pytest.approx(0.2), pytest.approx(0.2))
    wrong = [RankedPlan(row, -row.step_s) for row in sweep]
    assert scores(wrong) == (-1.0, pytest.approx(0.5), pytest.approx(0.5))
    assert ranking_quality([RankedPlan(row, row.step_s) for row in sweep[:3]]) == {}  # too few for a sweep
    # A plan that is not expected to fit is not picked, unless none is.
    assert scores([*wrong[:3], replace(wrong[3], fits=False)])[1] == pytest.approx(0.2)
    assert scores([replace(plan, fits=False) for plan in wrong])[1] == pytest.approx(0.5)
    # Rows of one plan are one plan, with the mean of their seconds: 10 and 11 of the best, 12 of the pick.
    twice = [replace(sweep[1], run=runs[0]), *sweep[:1], *sweep[2:]]
    plans = [RankedPlan(row, 1.0 if row.step_s == 12.0 else 2.0) for row in twice]
    assert scores(plans)[1] == pytest.approx(12 / 10.5 - 1)


def test_columns_that_would_narrow_the_range_are_named(tmp_path: Path) -> None:
    """Not a network that nothing crosses, and not a column that is filled."""
    rows = [TODAY | {"id": "a-1"}, TODAY | {"id": "a-2", "recompute": "full"}]
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [",".join(row.get(name, "") for name in names) for row in rows]
    (tmp_path / "t.csv").write_text("\n".join([",".join(names), *lines]))
    columns = {column.name: column for column in unstated_columns(tmp_path / "t.csv", shipped())}
    assert columns["recompute"].rows == 1 and columns["recompute"].spread > 0.05
    assert not {"network", "software", "mbs"} & set(columns)


def test_a_column_that_nothing_reads_is_told(tmp_path: Path) -> None:
    def table(**more: str) -> str:
        row = TODAY | more
        (tmp_path / "t.csv").write_text("\n".join([",".join(row), ",".join(row.values())]))
        return str(tmp_path / "t.csv")

    assert "Nothing reads the columns colour, team;" in scored(table(team="a", colour="red")).stdout
    assert "Nothing reads the columns" not in scored(table(notes="of mine", zero_stage="1")).stdout
    with pytest.raises(PlanError) as refused:
        scored(table(zero_stge="3", Recompute="full"))
    slips = [fault.split(",")[0] + fault[fault.index("; write") :].split(" if")[0] for fault in refused.value.faults]
    assert slips == [
        "line 1: there is no column 'zero_stge'; write zero_stage",
        "line 1: there is no column 'Recompute'; write recompute",
    ]


@pytest.mark.parametrize("table", sorted(TRUTH.glob("*.csv")), ids=lambda table: table.stem)
def test_every_column_of_published_runs_is_known(table: Path) -> None:
    header = table.read_text(encoding="utf-8").split("\n", 1)[0].strip().split(",")
    if {"id", "layers"} <= set(header):  # other tables are of collectives, kernels and routing
        assert set(header) <= COLUMNS


def test_a_table_of_memory_alone_has_no_scores_of_time(tmp_path: Path) -> None:
    row = TODAY | {"step_time_s": "", "peak_mem_gb": "4", "memory_kind": "allocator"}
    (tmp_path / "t.csv").write_text("\n".join([",".join(row), ",".join(row.values())]))
    text = " ".join(scored(str(tmp_path / "t.csv")).stdout.split())
    assert (
        "1 of 1 rows predicted, and none of them has a measured step time. Memory, where" in text
        and "% in the mean" in text
    )
    assert "all, tier A" not in text


def test_constants_are_fitted_to_ones_own_runs(tmp_path: Path) -> None:
    """Runs of a machine whose memory is slower: the fit finds that, and runs held back are predicted better by it."""
    rows = [row for row in read_runs(TRUTH / "playbook.csv") if row.run and row.run.grid.world == 8 and row.tier == "A"]
    rows = rows[::9]
    slower = shipped() | {"hopper.memory": 0.6 * shipped()["common.memory"]}
    rows = [replace(row, step_s=p.time.total) for row, p in zip(rows, predict(rows, slower), strict=True) if p.time]
    fit = fit_cluster(rows)
    assert fit.helps and fit.held_back < fit.before / 2
    assert fit.constants["memory"] < 0.9 * shipped()["common.memory"]
    (tmp_path / "mine.toml").write_text(toml_text(fit.entry()))
    device = calibration.device_of(str(tmp_path / "mine.toml"))
    assert device.constants is not None and device.peak_tflops == calibration.device_of("h100-sxm").peak_tflops
    assert device.constants.memory == pytest.approx(fit.constants["memory"], rel=1e-3)
    with pytest.raises(PlanError, match="3 plans have a measured step that can be predicted; --fit needs 4"):
        fit_cluster(rows[:3])
    with pytest.raises(PlanError, match="the table has runs on a100-sxm-80g, h100-sxm"):
        fit_cluster([*rows, next(row for row in published() if row.family == "aleph")])


def test_a_fit_is_of_the_runs_that_are_predicted(tmp_path: Path) -> None:
    """A table that states no recomputation, with plans that need some: its errors are those that `validate` prints
    before and, with the fitted device's file as the device of its rows, after."""
    shape = {"layers": "32", "hidden": "4096", "heads": "32", "ffn": "14336", "vocab": "32000", "seq": "4096"}
    plans = {"1": "4.6", "2": "4.1", "4": "4.4", "8": "5.8"}  # seconds of a step, by tp; tp 1 does not fit as it is
    rows = [
        TODAY | shape | {"id": f"a-{tp}", "gpu": "h100-sxm", "tp": tp, "gbs": "64", "step_time_s": step_s}
        for tp, step_s in plans.items()
    ]
    names, file = list(rows[0]), tmp_path / "mine.toml"

    def median_errors(table: str, device: str, *words: str) -> tuple[float, dict[str, Any]]:
        lines = [",".join((row | {"gpu": device})[name] for name in names) for row in rows]
        (tmp_path / table).write_text("\n".join([",".join(names), *lines]))
        scores = json.loads(scored(str(tmp_path / table), "--json", *words).stdout)
        return scores["median_ape"], scores.get("cluster_fit", {})

    before, fit = median_errors("t.csv", "h100-sxm", "--fit", str(file))
    assert any(p.priced_run != p.row.run for p in predict(read_runs(tmp_path / "t.csv"), shipped()))
    assert fit["helps"] and fit["catalog_median_ape"] == pytest.approx(before)
    after, _ = median_errors("u.csv", str(file))
    assert after == pytest.approx(fit["median_ape"], rel=0.02) and after < before / 2  # the file has four digits


def test_a_fit_that_does_not_help_is_not_written(tmp_path: Path) -> None:
    """Four runs of nothing in common: those held back are predicted worse by what the others say."""
    plans = zip(("1", "2", "3", "6"), ("0.01", "4", "0.02", "9"), strict=True)
    rows = [TODAY | {"id": f"a-{mbs}", "mbs": mbs, "gbs": "24", "step_time_s": step_s} for mbs, step_s in plans]
    text = "\n".join([",".join(TODAY), *(",".join(row.values()) for row in rows)])
    (tmp_path / "t.csv").write_text(text)
    done = scored(str(tmp_path / "t.csv"), "--fit", str(tmp_path / "mine.toml"))
    assert done.exit_code == 1 and not (tmp_path / "mine.toml").exists()
    assert "Runs held back are not predicted better than by the catalog" in done.stdout


# --- software that nothing is fitted to ---

PLAYBOOK = {
    "software": "nanotron@2025-02", "layers": "16", "hidden": "2048", "heads": "32", "kv_heads": "32", "ffn": "8192",
    "gated_mlp": "1", "vocab": "131072", "seq": "4096", "params_b": "1.342", "gpu": "H100", "gpus": "8",
    "gpus_per_node": "8", "intra_bw": "450", "inter_bw": "50", "tp": "1", "sp": "0", "pp": "1", "dp": "8",
    "zero_stage": "0", "mbs": "1", "gbs": "256", "recompute": "none", "precision": "bf16", "memory_kind": "first-rank",
}  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "tokens_per_s", "memory_gb"),
    [
        ({}, 39273, 39.4),
        ({"mbs": "2"}, 40150, 53.9),
        ({"pp": "2", "dp": "4"}, 0, 28.8),
        ({"pp": "8", "dp": "2", "gpus": "16", "zero_stage": "1", "mbs": "2"}, 22386, 29.2),
        ({"tp": "8", "sp": "1", "dp": "2", "gpus": "16", "mbs": "4"}, 0, 13.9),
    ],
)
def test_nanotron_is_predicted_from_its_source(plan: dict[str, str], tokens_per_s: float, memory_gb: float) -> None:
    """Runs of the Ultra-Scale Playbook's grid (hfgrid-0001, 0002, 0004, 0041, 0075), to which no constant is fitted."""
    row = measured(TableLine(2, {"id": "hfgrid-1", "tokens_per_s_per_gpu": str(tokens_per_s or ""), **PLAYBOOK} | plan))
    (predicted,) = predict([row], shipped())
    assert predicted.memory_gb == pytest.approx(memory_gb, rel=0.07)
    assert not tokens_per_s or predicted.ratio == pytest.approx(1, abs=0.2)


def test_blocks_are_divided_by_the_size_of_their_products() -> None:
    """The head counts as 4 layers, 131,072 / (4 x 2,048 + 3 x 8,192); the block that reaches a share is its last."""
    row = PLAYBOOK | {"gpus": "", "dp": "1"}
    layouts = [run_of(row | {"id": "x", "pp": str(pp)}).grid.layout for pp in (1, 2, 4, 8)]
    assert layouts == [(), (10, 6), (5, 5, 5, 1), (3, 2, 3, 2, 3, 2, 1, 0)]


def test_stated_parameters_tell_whether_a_table_is_tied() -> None:
    row = PLAYBOOK | {"id": "x"}
    assert run_of(row).shape.tied and run_of(row).shape.parameters == pytest.approx(1.342e9, rel=1e-3)
    assert not run_of(row | {"params_b": "1.61"}).shape.tied
    assert not run_of(row | {"params_b": ""}).shape.tied


@pytest.mark.parametrize(
    ("change", "is_apart"),
    [({}, True), ({"attention": "flash1"}, True), ({"attention": "fused-softmax"}, False), ({"mbs": "2"}, False),
     ({"gpus": "16", "gbs": "16"}, False), ({"recompute": "full"}, False), ({"gpu": "H100"}, False)],
)  # fmt: skip
def test_a_plan_that_ran_out_beside_one_that_needs_as_much(change: dict[str, str], is_apart: bool) -> None:
    """A larger batch has more microbatches, and is another run."""
    row = TODAY | {"software": "megatron-lm@2023-08", "attention": "flash2"}
    lines = [TableLine(2, row), TableLine(3, row | {"id": "mine-2"} | change)]
    ran, failed = predict([measured(line) for line in lines], shipped())
    assert (fit_scores([ran], [failed])["contradicted"] == {"mine-2": "mine-1"}) is is_apart


def test_plans_that_ran_out_of_memory_may_stand_among_others(tmp_path: Path) -> None:
    rows = [TODAY | {"id": "a-1", "oom": "no"}, TODAY | {"id": "a-2", "oom": "yes", "step_time_s": ""}]
    (tmp_path / "t.csv").write_text("\n".join(",".join(line) for line in (rows[0], *(row.values() for row in rows))))
    fit = validate_table(tmp_path / "t.csv", None)["fit"]
    assert (fit["ran"], fit["ran_out"], fit["which"]["false_fits"]) == (1, 1, ["a-2"])
    assert fit["by_family"] == {"a": {"false_fits": 1, "ran_out": 1, "false_misfits": 0, "ran": 1}}
    assert fit["contradicted"] == {"a-2": "a-1"}
    assert fit["by_chance"] == {
        name: {"plans": 2 * (name == "high"), "ran": name == "high"} for name in fit["by_chance"]
    }


def test_memory_is_compared_with_the_counter_that_software_reports() -> None:
    plan = {"tp": "4", "sp": "1", "dp": "2"}
    reserved, given_out, allocated, driver = (
        predict([measured(TableLine(2, {"id": "a-1"} | PLAYBOOK | plan | changes))], shipped())[0].memory_gb
        for changes in ({}, {"memory_kind": "allocator"}, {"software": "megatron-core"}, {"memory_kind": "driver"})
    )
    memory = peak_memory(run_of(PLAYBOOK | plan | {"id": "a-1"}), shipped())
    assert reserved == pytest.approx(float(memory.reserved(80e9)) / 1e9)
    assert given_out == pytest.approx(float(memory.total) / 1e9)
    context = process_bytes(run_of(PLAYBOOK | plan | {"id": "a-1"}), shipped()["common.context_bytes"])
    assert context > shipped()["common.context_bytes"]  # NCCL's communicators are counted one by one
    assert driver == pytest.approx((context + float(memory.reserved(80e9))) / 1e9)
    other = peak_memory(run_of(PLAYBOOK | plan | {"id": "a-1", "software": "megatron-core"}), shipped())
    assert allocated == pytest.approx(float(other.total) / 1e9)
