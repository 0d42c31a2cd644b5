"""Two formulas that anyone can write down, as planners: Megatron-LM's own account of memory, and a textbook's of both.

MegatronFormula: Megatron-LM, megatron/training/theoretical_memory_usage.py at 00caa53, the formula written again.
Textbook: Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054) for weights, gradients and optimizer, Korthikanti et al. 2022
(arXiv 2205.05198, table 2) for activations, half of the peak and a pipeline's bubble (Narayanan et al. 2021) for time.
"""

import math

from answer import Answer, limits_of_all, refuse

from shardwright.config.software import software_of
from shardwright.cost.calibration import peak_flops
from shardwright.layers.query import Run

EFFICIENCY = 0.5  # of the peak
WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 2, 12  # mixed precision with Adam (ZeRO, section 3.1)


def keeps_scores(run: Run) -> bool:
    """True if the backward pass finds attention's scores in memory."""
    return software_of(run.software).attention in ("torch", "softmax") and run.grid.recompute == "none"


def num_microbatches(run: Run) -> int:
    """Microbatches of a step on one replica."""
    return max(1, int(run.grid.global_batch // (run.grid.dp * run.grid.microbatch)))


def interleaving_factor(run: Run) -> float:
    """Activations of an interleaved schedule over those of 1F1B (Korthikanti et al., appendix C)."""
    return 1 + (run.grid.pp - 1) / (run.grid.pp * run.grid.virtual) if run.grid.virtual > 1 else 1.0


class MegatronFormula:
    """Megatron-LM's report of theoretical memory. It has no time."""

    def answer(self, run: Run) -> Answer:
        """Memory of the first pipeline stage; ValueError with what the formula leaves out."""
        shape, grid = run.shape, run.grid
        can_say = {
            "experts are not divided over ranks": shape.experts is None,
            "latent attention, not translated here": shape.latent is None,
            "no recomputation of whole layers": grid.recompute in ("none", "selective"),
            "attention's scores are never kept": not keeps_scores(run),
            f"no ZeRO-{grid.zero}": grid.zero <= 1,
            "no context parallelism": grid.cp == 1,
        } | limits_of_all(run)
        refuse([limit for limit, can in can_say.items() if not can])
        return Answer(0.0, (self._model_bytes(run) + self._activation_bytes(run)) / 1e9)

    def _vocab(self, run: Run) -> int:
        """Rows of the embedding table, padded as Megatron-LM pads them."""
        unit = 128 * run.grid.tp
        return math.ceil(run.shape.vocab / unit) * unit

    def _model_bytes(self, run: Run) -> float:
        """Weights, gradients and optimizer: 18 bytes a parameter, or 6 and 12 over the replicas."""
        shape, grid = run.shape, run.grid
        norms = 1 if shape.gated else 2  # weights of RMSNorm, or weights and biases of LayerNorm
        attention = 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)
        layer = 2 * shape.hidden * (shape.ffn * (1.5 if shape.gated else 1) + norms) + attention
        table = self._vocab(run) * shape.hidden
        num_tables = 1 if shape.tied or grid.pp > 1 else 2
        blocks = layer * shape.layers + norms * shape.hidden
        parameters = (blocks / grid.pp + num_tables * table) / grid.tp
        return parameters * (6 + 12 / grid.dp if grid.zero else 18)

    def _activation_bytes(self, run: Run) -> float:
        """Activations of the first stage, by one of two formulas: with sequence parallelism and selective recomputation
        by the first, else by the second."""
        shape, grid = run.shape, run.grid
        tokens = shape.sequence * grid.microbatch
        is_divided = bool(grid.sequence_parallel) and grid.recompute == "selective"
        if is_divided:
            layer = tokens * (18 * shape.hidden + 4 * shape.ffn)
        else:
            layer = tokens * shape.hidden * (10 + 24 / grid.tp)
        kept = layer * shape.layers + (8 + shape.hidden) * tokens * grid.pp
        if grid.virtual > 1:
            kept *= interleaving_factor(run)
        elif grid.pp > 1:
            kept *= min(1, num_microbatches(run) / grid.pp)
        if is_divided:
            head = 4 * tokens * (shape.hidden + self._vocab(run)) if grid.pp == 1 else 0
            return (kept + head) / grid.tp
        head = 2 * tokens * (shape.hidden + self._vocab(run) / grid.tp) if grid.pp == 1 else 0
        return 1.05 * (kept + head)


class Textbook:
    """Half of the peak with a pipeline's bubble, and the account of memory of two papers. It takes any plan."""

    def answer(self, run: Run) -> Answer:
        """Step and memory of the first pipeline stage."""
        shape, grid = run.shape, run.grid
        flops = (
            shape.flops_per_token() * shape.sequence * grid.global_batch * (4 / 3 if grid.recompute == "full" else 1)
        )
        bubble = (grid.pp - 1) / (grid.virtual * num_microbatches(run))
        step_s = flops / (EFFICIENCY * peak_flops(run) * grid.world) * (1 + bubble)
        return Answer(float(step_s), float(self._model_bytes(run) + self._activation_bytes(run)) / 1e9)

    def _model_bytes(self, run: Run) -> float:
        """Weights, gradients and optimizer of the first stage, as ZeRO divides them."""
        shape, grid = run.shape, run.grid
        layers = [shape.kind_parameters(shape.kind(layer)) for layer in range(shape.layers)]
        dense, routed = (sum(counts) / grid.pp / grid.tp for counts in zip(*layers, strict=True))
        num_tables = shape.num_tables if grid.pp == 1 else 1
        dense += num_tables * shape.table_elements / grid.tp
        replicas = (grid.zero_ranks or grid.dp) * grid.cp
        return dense * self._parameter_bytes(run, replicas) + routed / grid.ep * self._parameter_bytes(
            run, max(1, replicas / grid.ep)
        )

    def _parameter_bytes(self, run: Run, replicas: float) -> float:
        """Bytes of one parameter on one of the replicas that share its shards."""
        amounts = ((WEIGHT_BYTES, 3), (GRADIENT_BYTES, 2), (OPTIMIZER_BYTES, 1))
        return sum(num_bytes / (replicas if run.grid.zero >= stage else 1) for num_bytes, stage in amounts)

    def _activation_bytes(self, run: Run) -> float:
        """Activations of the first stage, and the logits in float32 if it has the head."""
        shape, grid = run.shape, run.grid
        tokens = shape.sequence * grid.microbatch / grid.cp
        elements = 34 / grid.tp if grid.sequence_parallel else 10 + 24 / grid.tp
        if keeps_scores(run):
            elements += 5 * shape.heads * shape.sequence / (shape.hidden * grid.tp)
        if grid.recompute == "full":
            elements = 2
        in_flight = min(grid.pp, num_microbatches(run)) * interleaving_factor(run)
        logits = 4 * tokens * shape.vocab / grid.tp if grid.pp == 1 else 0
        return tokens * shape.hidden * elements * shape.layers / grid.pp * in_flight + logits
