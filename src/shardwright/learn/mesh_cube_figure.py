"""The mesh as a cube: ranks of a job in isometric view, by stage, replica and tensor-parallel rank; the same ranks with
a fourth axis for parts of a sequence, and a fifth for experts."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from shardwright.config.phrase import in_language, say
from shardwright.config.plan import PlanSpec
from shardwright.config.text_columns import num_columns
from shardwright.learn.drawing import Drawing
from shardwright.learn.playable_figure import FigureJob
from shardwright.report import svg
from shardwright.sharding.groups import CP, DP, EP, PP, REPLICAS, TP, GroupKind, layout
from shardwright.sharding.mesh import MeshShape

_TILE, _THICK, _STOREY, _GAP = 31.0, 9.0, 176.0, 0.35  # px; gaps are shares of a tile
_PANEL, _TOP, _WIDTH = 326.0, 92.0, 988.0
_STEEP = (math.cos(math.pi / 6), math.sin(math.pi / 6))
_LINES = {TP: "#dc2626", CP: "#d97706", DP: "#0d9488", PP: "#7c3aed", EP: "#db2777", REPLICAS[True]: "#0d9488"}
_STYLE = (
    svg.STYLE
    + """
.halo { stroke: #ffffff }
@media (prefers-color-scheme: dark) { .halo { stroke: #e7eaf0 } }"""
)


@dataclass(frozen=True)
class MeshCube:
    """One view: its title, what colours mean, the plan, and the kinds of groups of which rank 0's lines are drawn."""

    title: str
    colour: str
    plan: PlanSpec
    groups: Sequence[GroupKind]

    @property
    def mesh(self) -> MeshShape:
        """The places of the ranks."""
        return MeshShape.of(self.plan)

    def line(self, kind: GroupKind, first: int = 0) -> list[int]:
        """The ranks of a group, the first of which is `first`."""
        return layout(self.plan, kind).line(first)

    def expert_places(self) -> dict[int, int]:
        """The place of each rank among those that hold different experts."""
        places = dict[int, int]()
        for rank in range(self.mesh.world):
            if rank not in places:
                places |= {member: place for place, member in enumerate(self.line(EP, rank))}
        return places


def mesh_cubes() -> list[MeshCube]:
    """Views with three, four and five axes, of as many ranks."""
    common = ("plan.pp=2", "plan.tp=4", "plan.sequence_parallel=true", "plan.order=dp-pp", "plan.zero=1")

    def plan(model: str, *sets: str) -> PlanSpec:
        return FigureJob(model, 32, "h100-sxm", (*common, *sets)).spec.plan

    reads = say("colour: the sequences that a rank reads")
    return [
        MeshCube("pp 2 x dp 4 x tp 4", reads, plan("llama3-8b", "plan.dp=4"), (TP, DP, PP)),
        MeshCube(
            "pp 2 x dp 2 x cp 2 x tp 4",
            say("colour: sequences; paler: their other half"),
            plan("llama3-8b", "plan.dp=2", "plan.cp=2"),
            (TP, CP, DP, PP),
        ),
        MeshCube(
            "pp 2 x dp 2 x cp 2 x tp 4, ep 8",
            say("colour: the experts that a rank holds"),
            plan("mixtral-8x7b", "plan.dp=2", "plan.cp=2", "plan.ep=8", "plan.expert_tp=1"),
            (EP, REPLICAS[True], PP),
        ),
    ]


def mesh_cube_figure() -> Drawing:
    """All views side by side."""
    return partial(_drawn, mesh_cubes())


def _drawn(cubes: Sequence[MeshCube], language: str) -> str:
    title = in_language(say("32 ranks as a cube: a storey is a stage, and lines are the groups of rank 0"), language)
    parts = [svg.text(16, 26, title, "name", 15)]
    for number, cube in enumerate(cubes):
        parts += _view(cube, 10 + number * _PANEL, language)
    return svg.document(title, _WIDTH, 544, parts, _STYLE)


def _view(cube: MeshCube, left: float, language: str) -> Iterator[str]:
    """Tiles from the far side to the near one, then lines, then numbers."""
    yield svg.text(left + 6, 54, cube.title, "name", 13)
    yield svg.text(left + 6, 73, in_language(cube.colour, language), size=12)
    mesh, experts = cube.mesh, cube.expert_places() if EP in cube.groups else {}
    places = {rank: mesh.coordinates(rank) for rank in range(mesh.world)}
    points = {rank: _point(mesh, place, left) for rank, place in places.items()}
    for storey in range(mesh.sizes["pp"] - 1, -1, -1):
        for rank in sorted((rank for rank in points if places[rank]["pp"] == storey), key=lambda rank: points[rank][1]):
            place = places[rank]
            hue = svg.LINE_COLOURS[experts.get(rank, place["dp"]) % len(svg.LINE_COLOURS)]
            yield _tile(*points[rank], hue, 0.28 if place["cp"] and not experts else 0.6)
        if storey:  # what lies above hides the way up
            yield _path([points[rank] for rank in cube.line(PP)], PP)
    for number, kind in enumerate(kind for kind in cube.groups if kind is not PP):
        yield _path([(points[rank][0], points[rank][1] - 4 * number) for rank in cube.line(kind)], kind)
    for rank, (x, y) in points.items():
        yield f'<circle class="ground" cx="{svg.px(x)}" cy="{svg.px(y)}" r="9.5"/>'
        yield svg.text(x, y + 4, str(rank), "name", 11, "middle")
    for number, kind in enumerate(cube.groups):
        x, y = left + 6, 466 + 20 * number
        ranks = cube.line(kind)
        words = f"{_name(kind)} {len(ranks)}: {' '.join(map(str, ranks))}"
        yield f'<rect x="{svg.px(x)}" y="{svg.px(y - 8)}" width="18" height="5" fill="{_LINES[kind]}"/>'
        yield svg.text(x + 26, y, words, "name", 13)
        share = in_language(_SHARES[kind], language)
        yield svg.text(x + 40 + 7.6 * num_columns(words), y, share, size=12)


_SHARES = {
    TP: say("same tokens"),
    CP: say("parts of a sequence"),
    DP: say("other sequences"),
    PP: say("other layers"),
    EP: say("other experts"),
    REPLICAS[True]: say("same experts"),
}


def _name(kind: GroupKind) -> str:
    return kind.axes[0]


def _path(points: Sequence[tuple[float, float]], kind: GroupKind) -> str:
    """A line through neighbouring places; it begins anew where the next place is far, and does not where stages are."""
    words = ""
    for before, point in zip((points[0], *points), points, strict=False):
        is_far = kind is not PP and math.dist(before, point) > 2.6 * _TILE
        words += f"{'M' if not words or is_far else 'L'} {svg.px(point[0])} {svg.px(point[1])} "
    colour = _LINES[kind]
    halo = f'<path class="halo" d="{words.strip()}" fill="none" stroke-width="7" stroke-linecap="round"/>'
    return f'{halo}<path d="{words.strip()}" fill="none" stroke="{colour}" stroke-width="4" stroke-linecap="round"/>'


def _point(mesh: MeshShape, place: dict[str, int], left: float) -> tuple[float, float]:
    """The middle of a rank's tile: tp to the right, dp and cp to the left, stages below each other."""
    cp = mesh.sizes["cp"]
    depth = place["dp"] * cp + place["cp"] + _GAP * place["dp"] * (cp > 1)
    across = place["tp"] - depth, place["tp"] + depth
    x = left + _PANEL / 2 - 8 + across[0] * _TILE * _STEEP[0]
    return x, _TOP + 22 + across[1] * _TILE * _STEEP[1] + place["pp"] * _STOREY


def _tile(x: float, y: float, hue: str, opacity: float) -> str:
    """A flat block: its top, and two darker sides."""
    wide, high = 0.94 * _TILE * _STEEP[0], 0.94 * _TILE * _STEEP[1]
    top = f"M {svg.px(x)} {svg.px(y - high)} l {svg.px(wide)} {svg.px(high)} l {svg.px(-wide)} {svg.px(high)} "
    top += f"l {svg.px(-wide)} {svg.px(-high)} z"
    sides = f"M {svg.px(x - wide)} {svg.px(y)} l {svg.px(wide)} {svg.px(high)} l {svg.px(wide)} {svg.px(-high)} "
    sides += f"v {_THICK:g} l {svg.px(-wide)} {svg.px(high)} l {svg.px(-wide)} {svg.px(-high)} z"
    return (
        f'<path class="ground" d="{top}"/><path d="{top}" fill="{hue}" fill-opacity="{opacity:g}"/>'
        f'<path class="ground" d="{sides}"/><path d="{sides}" fill="{hue}" fill-opacity="{min(1.0, opacity + 0.3):g}"/>'
    )
