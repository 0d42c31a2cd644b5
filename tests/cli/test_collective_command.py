"""`shardwright collective`: drawn, priced, run here, and refused."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from shardwright.cli.main import cli
from shardwright.config.base import PlanError
from shardwright.sharding.collective_steps import KINDS

AFTER = {"all-reduce": "S0 S1 S2", "reduce": "S0 S1 S2", "all-gather": "a0 b1 c2", "all-to-all": "a0 b0 c0"}


def shown(*words: str) -> str:
    return CliRunner().invoke(cli, ["collective", *words], catch_exceptions=False).output


@pytest.mark.parametrize("kind", KINDS)
def test_it_draws_every_kind(kind: str, tmp_path: Path) -> None:
    text = shown(kind, "--ranks", "3", "--bytes", "3MB", "--svg", str(tmp_path / "steps.svg"))
    assert text.startswith(f"{kind} of 3 MB (2.861 MiB) over 3 ranks, on 1 node of h100-sxm.")
    assert AFTER.get(kind, "rank 0") in text
    fields = json.loads(shown(kind, "--ranks", "3", "--json"))
    assert fields["algorithms"] and fields["drawn"] in text
    assert all(move["sender"] != move["receiver"] for step in fields["steps"] for move in step)
    picture = ElementTree.parse(tmp_path / "steps.svg").getroot()
    assert sum(1 for mark in picture.iter() if mark.text == f"step {len(fields['steps'])}") == 1


def test_another_algorithm_is_drawn() -> None:
    assert "tree, what each rank receives" in shown("all_reduce", "--ranks", "4", "--algorithm", "tree")


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["nothing"], "nothing is none; use broadcast"),
        (["AllReduce"], "AllReduce is none; use all-reduce"),
        (["all-reduce", "--algorithm", "star"], "there are: ring, direct, tree"),
        (["all-reduce", "--device", "h1000"], "h1000"),
        (["all-reduce", "--cluster", "mars"], "mars"),
        (["all-reduce", "--cluster", "h100-node", "--device", "h100-sxm"], "leave --device"),
        (["all-reduce", "--ranks", "12"], "not whole nodes of 8"),
        (["all-reduce", "--cluster", "this-machine"], "the device of this-machine is unknown; use --device"),
        (["all-reduce", "--device", "h100-pcie", "--ranks", "16"], "set cluster.inter_node.bandwidth_gb_per_s"),
        (["all-reduce", "--set", "plan.tp=2"], "plan.tp=2 is no field of the cluster"),
        (["all-reduce", "--ranks", "9", "--devices-per-node", "9", "--svg", "x.svg"], "2 to 8 ranks"),
    ],
)
def test_bad_input_is_refused(words: list[str], fault: str) -> None:
    with pytest.raises(PlanError, match=fault):
        shown(*words)


def test_a_link_may_be_another() -> None:
    words = ("all-reduce", "--device", "h100-pcie", "--ranks", "16")
    shown_links = shown(*words, "--set", "cluster.inter_node.bandwidth_gb_per_s=25")
    assert "between nodes 25 GB/s a device stated" in shown_links


def test_a_size_is_a_number_with_a_unit() -> None:
    result = CliRunner().invoke(cli, ["collective", "all-reduce", "--bytes", "1 ZB"])
    assert result.exit_code == 2 and "is no size" in result.output


@pytest.mark.processes
def test_it_runs_here() -> None:
    fields = json.loads(shown("scatter", "--ranks", "2", "--bytes", "4KB", "--run", "--json"))
    assert fields["run"]["backend"] == "Gloo" and fields["run"]["seconds"] > 0
    assert fields["run"]["num_bytes"] == 4000 and fields["run"]["sent_bytes"] == [2000, 0]
