"""The tree by which plans are begun, with models of the catalog on the branches where their state puts them."""

from collections.abc import Mapping, Sequence
from functools import partial

from shardwright.config.phrase import in_language, say
from shardwright.config.units import memory_text
from shardwright.learn.drawing import Drawing
from shardwright.learn.playable_figure import FigureJob
from shardwright.planner.advice.rules import PlaceOfState, place_of_state
from shardwright.report import svg

_DEVICE, _DEVICES = "h100-sxm", 64
_MODELS = (
    *("gpt2-xl", "llama3.2-1b", "llama3.2-3b", "llama2-7b", "llama3-8b", "llama2-13b", "llama-33b"),
    *("mixtral-8x7b", "llama2-70b", "gpt3-175b", "mixtral-8x22b", "llama3-405b"),
)
_BRANCHES = {
    "device": (say("fits one device"), [say("replicas, ZeRO 1")]),
    "node": (say("fits a node"), [say("ZeRO, or tp inside it")]),
    "more": (say("is more than a node"), [say("tp inside, pp across, dp over the rest"), say("or ZeRO 3")]),
}
_WIDTH, _COLUMN, _TOP, _LINE = 960.0, 300.0, 136.0, 21.0


def branches() -> dict[str, list[tuple[str, PlaceOfState]]]:
    """Models by the place that their state needs, smallest first."""
    models = dict[str, list[tuple[str, PlaceOfState]]]()
    for model in _MODELS:
        job = FigureJob(model, _DEVICES, _DEVICE, (f"plan.dp={_DEVICES}", "plan.zero=1")).spec
        place = place_of_state(job)
        assert place is not None, model
        models.setdefault(place.place, []).append((model, place))
    return {name: sorted(models[name], key=lambda pair: pair[1].state_bytes) for name in _BRANCHES}


def tree_figure() -> Drawing:
    """The questions from left to right, and their answers below."""
    return partial(_drawn, branches())


def _drawn(models: Mapping[str, Sequence[tuple[str, PlaceOfState]]], language: str) -> str:
    place = next(iter(models.values()))[0][1]
    numbers = {"memory": memory_text(int(place.memory_bytes)), "node": place.node}
    title = say("State, 18 bytes a parameter, on nodes of {node} devices of {memory}", **numbers)
    parts = [svg.text(16, 26, in_language(title, language), "name", 15)]
    height = _TOP + _LINE * max(map(len, models.values())) + 16
    for number, (name, rows) in enumerate(models.items()):
        left, (question, answers) = 16 + number * (_COLUMN + 14), _BRANCHES[name]
        colour = svg.LINE_COLOURS[number]
        parts.append(
            f'<rect x="{svg.px(left)}" y="44" width="{_COLUMN:g}" height="{svg.px(height - 56)}" rx="8" '
            f'fill="{colour}" fill-opacity="0.1" stroke="{colour}"/>'
        )
        parts.append(svg.text(left + 12, 66, in_language(question, language), "name", 14))
        for line, answer in enumerate(answers):
            parts.append(svg.text(left + 12, 88 + 18 * line, in_language(answer, language), "name", 13))
        if number:
            x = left - 13
            parts.append(f'<path class="mark" d="M {svg.px(x)} 62 h 11 m -5 -5 l 5 5 l -5 5" fill="none"/>')
        for row, (model, state) in enumerate(rows):
            y = _TOP + row * _LINE
            parts.append(svg.text(left + 12, y, model, size=13))
            size = memory_text(int(state.state_bytes))
            parts.append(svg.text(left + _COLUMN - 12, y, size, size=13, anchor="end"))
    return svg.document(in_language(title, language), _WIDTH, height, parts)
