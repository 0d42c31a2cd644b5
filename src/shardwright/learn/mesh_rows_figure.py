"""The ranks of a job as rows of cells, a row for each node."""

from functools import partial

from shardwright.config.phrase import in_language, say
from shardwright.learn.drawing import Drawing
from shardwright.learn.playable_figure import FigureJob
from shardwright.report import svg
from shardwright.sharding.mesh import MeshShape


def mesh_rows_figure() -> Drawing:
    """Ranks as cells: rows are nodes, and colours are stages; deeper ones are later replicas."""
    sets = ("plan.pp=2", "plan.tp=4", "plan.dp=4", "plan.order=dp-pp", "plan.zero=1")
    shape = MeshShape.of(FigureJob("llama3-8b", 32, "h100-sxm", sets).spec.plan)
    return partial(_drawn, shape)


def _drawn(shape: MeshShape, language: str) -> str:
    node, cell = 8, 58.0
    title = say("pp 2 x dp 4 x tp 4 on 4 nodes of 8: a row is a node, a colour a stage")
    drawn = [svg.text(16, 24, in_language(title, language), "name", 13)]
    for rank in range(shape.world):
        place = shape.coordinates(rank)
        x, y = 70 + (rank % node) * (cell + 6), 50 + (rank // node) * (cell - 14)
        drawn.append(
            f'<rect x="{svg.px(x)}" y="{svg.px(y)}" width="{cell:g}" height="{cell - 22:g}" rx="4" '
            f'fill="{svg.LINE_COLOURS[place["pp"]]}" fill-opacity="{0.25 + 0.18 * place["dp"]:.2f}"/>'
        )
        drawn.append(svg.text(x + cell / 2, y + 15, f"rank {rank}", "name", 11, "middle"))
        drawn.append(
            svg.text(x + cell / 2, y + 28, f"p{place['pp']} d{place['dp']} t{place['tp']}", "name", 10, "middle")
        )
        if rank % node == 0:
            name = in_language(say("node {number}", number=rank // node), language)
            drawn.append(svg.text(60, y + 22, name, anchor="end"))
    label = in_language(say("mesh of ranks"), language)
    return svg.document(label, 70 + node * (cell + 6) + 10, 50 + shape.world // node * (cell - 14) + 8, drawn)
