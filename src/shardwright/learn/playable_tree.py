"""The playable tree of choosing: the state of a model beside the memory of a device and of a node, and the branch."""

from collections.abc import Mapping

from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.units import memory_text
from shardwright.learn.drawing import Drawing
from shardwright.learn.playable_figure import FigureControl, FigureFrame, FigureJob, PlayableFigure
from shardwright.planner.advice.rules import first_place_of_state, place_of_state
from shardwright.report.bars_picture import StackedBars

_DEVICES = 64
_MODELS = ("gpt2-xl", "llama3.2-3b", "llama3-8b", "llama2-13b", "llama-33b", "llama2-70b", "gpt3-175b", "llama3-405b")
_START = 2
_KINDS = ("v100-sxm-32g", "a100-sxm-80g", "h100-sxm", "h200-sxm", "b200-sxm", "gb200-nvl72")


def _asked(model: str, device: str) -> FigureJob:
    return FigureJob(model, _DEVICES, device, (f"plan.dp={_DEVICES}", "plan.zero=1"))


def _sizes(job: JobSpec) -> list[tuple[str, float]]:
    """Bytes of the state, and of what may hold it."""
    place = place_of_state(job)
    assert place is not None, job.cluster.device
    domain = say("memory of a {domain} of {node}", domain=place.domain, node=place.node)
    return [
        (say("state, 18 bytes a parameter"), place.state_bytes),
        (say("memory of a device"), place.memory_bytes),
        (domain, place.node * place.memory_bytes),
    ]


def branch_picture() -> Drawing:
    """The bars of the first model and device to show."""
    model, device = _MODELS[_START], _KINDS[_START]
    part: str = say("memory")
    rows = [(name, {part: size}) for name, size in _sizes(_asked(model, device).spec)]
    title = say(
        "{model} on {devices} {device}: its state, and what may hold it", model=model, devices=_DEVICES, device=device
    )
    return StackedBars(title, rows, lambda size: memory_text(int(size))).svg


def _branch(model: str, device: str) -> FigureFrame:
    """Three bars, and the words of `plan` and `explain` on the branch."""
    asked = _asked(model, device)
    rule = first_place_of_state(asked.spec)
    assert rule is not None, device
    rows = [
        {"label": name, "parts": [[say("memory"), size, memory_text(int(size))]], "total": memory_text(int(size))}
        for name, size in _sizes(asked.spec)
    ]
    plan = f"shardwright plan {model} --devices {_DEVICES} --device {device}"
    return FigureFrame({"rows": rows}, [(say("branch"), rule.says)], f"{plan}\n{asked.command('explain')}")


TREE: Mapping[str, PlayableFigure] = {
    "choosing-branch": PlayableFigure(
        say("The branch of a model on {devices} devices, by its state", devices=_DEVICES),
        "bars",
        [FigureControl(say("model"), _MODELS, _START), FigureControl(say("device"), _KINDS, _START)],
        _branch,
    ),
}
