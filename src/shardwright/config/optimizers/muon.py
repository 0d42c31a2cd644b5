"""Muon: updates of the layers' matrices are made orthogonal, and AdamW updates the others. Jordan et al. 2024, Liu et
al. 2025."""

from shardwright.config.optimizer_facts import OptimizerFacts

FACTS = OptimizerFacts(
    name="muon",
    place=60,
    title="Muon",
    rule="shardwright.parallel.optimizers.elementwise:adamw",
    moments=lambda spec: ("exp_avg", "exp_avg_sq"),
    decays=("beta1", "beta2", "momentum"),
    reads=frozenset({"beta1", "beta2", "epsilon", "momentum", "newton_schulz_steps"}),
    costs_as_adamw=True,
    matrix_update="orthogonal",
    layers_alone=True,
    matrix_rule="shardwright.parallel.optimizers.elementwise:nesterov",
    matrix_moments=("momentum_buffer",),
)
