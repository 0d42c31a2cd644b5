"""Low-rank adapters of a model's matrices (LoRA): Hu et al. 2021 (arXiv 2106.09685)."""

from typing import Annotated, Any, Literal

from pydantic import Field

from shardwright.config import largest
from shardwright.config.base import Spec
from shardwright.config.field_types import Positive, WidthOr0
from shardwright.config.matrix import Matrix
from shardwright.config.nf4_rows import RowFormat
from shardwright.config.phrase import say

Target = Literal["query", "key", "value", "out", "gate", "up", "down", "expert_gate", "expert_up", "expert_down"]
TARGETS: tuple[Target, ...] = ("query", "key", "value", "out", "gate", "up", "down")
EXPERT_TARGETS: tuple[Target, ...] = ("expert_gate", "expert_up", "expert_down")
# The linear maps that lie side by side in a matrix, by the matrix's name and in their order.
_MAPS: dict[str, tuple[Target, ...]] = {
    "qkv": ("query", "key", "value"),
    "out": ("out",),
    "up": ("gate", "up"),
    "down": ("down",),
}
_MAPS_OF_EXPERTS: dict[str, tuple[Target, ...]] = {"up": EXPERT_TARGETS[:2], "down": EXPERT_TARGETS[2:]}


class AdapterSpec(Spec):
    """Adapters: to each target map W, alpha / rank x B A is added, with A [rank, inputs] and B [outputs, rank]. They
    alone are trained; the model's own weights are frozen, without gradients, master weights or moments. The matrices of
    its layers may be stored in 4 bits (QLoRA)."""

    rank: WidthOr0 = Field(0, description="Rank of the adapters; 0 means that the model's own weights are trained.")
    alpha: Positive = Field(16.0, description="What the adapters add is multiplied with alpha / rank.")
    targets: Annotated[tuple[Target, ...], Field(max_length=largest.WORKSPACES)] = Field(
        TARGETS,
        description="Linear maps of each layer that have an adapter: of attention, of the MLP that all tokens meet, "
        "dense or of shared experts, and of routed experts, each expert its own.",
    )

    base: Literal["compute", "nf4"] = Field(
        "compute",
        description="How the matrices of layers are stored: in the number type of the computation, or in NF4, 4 bits "
        "an element and a scale for each 64 of a row, and made numbers again for each product.",
    )
    double_quantization: bool = Field(
        False, description="Quantise the scales of NF4 too: 8 bits each, and one greatest for up to 256 of a row."
    )
    weights: str = Field(
        "",
        description="Folder of an adapter that peft wrote, whose values training begins with; empty means random ones.",
    )

    @property
    def row_format(self) -> RowFormat:
        """The order in which the rows of the matrices of layers are stored."""
        if self.base == "compute":
            return ""
        return "nf4-double" if self.double_quantization else "nf4"

    @property
    def scale(self) -> float:
        """The factor of what an adapter adds."""
        return self.alpha / self.rank

    def maps(self, matrix: Matrix) -> tuple[Target, ...]:
        """The names of the linear maps that lie side by side in a matrix; the last ones if it has fewer than named."""
        names = (_MAPS_OF_EXPERTS if matrix.experts else _MAPS).get(matrix.name, ())
        return names[-len(matrix.widths or (1,)) :]

    def targets_of(self, matrix: Matrix) -> tuple[Target, ...]:
        """The linear maps of a matrix that have an adapter."""
        return tuple(name for name in self.maps(matrix) if name in self.targets) if self.rank else ()

    def elements(self, matrix: Matrix, tp: Any = 1) -> Any:
        """Elements of the adapters of a matrix on each of `tp` ranks, which cut what they cut of the matrix; of one
        expert, if each has a matrix."""
        return self.rank * (len(self.targets_of(matrix)) * matrix.inner_on(tp) + self.columns(matrix, tp))

    def columns(self, matrix: Matrix, tp: Any = 1) -> Any:
        """Outputs on each of `tp` ranks of the maps of a matrix that have an adapter."""
        widths = matrix.widths or (1,)
        maps = dict(zip(self.maps(matrix), widths, strict=True)) if self.targets_of(matrix) else {}
        return sum(maps[target] for target in self.targets_of(matrix)) * (matrix.columns_on(tp) // sum(widths))

    def faults(self) -> list[str]:
        """Contradictions among the fields of the section."""
        if self.rank and not self.targets:
            return [
                say("model.adapter.rank is set, and model.adapter.targets names no map; name some, or leave rank out")
            ]
        if not self.rank and self != AdapterSpec():
            return [say("model.adapter is set, and its rank 0 means no adapters; set rank, or leave it out")]
        if self.double_quantization and self.base != "nf4":
            return [
                say(
                    "model.adapter.double_quantization is of the scales of NF4, and model.adapter.base is 'compute'; "
                    'set base = "nf4", or leave double_quantization out'
                )
            ]
        return []
