"""Each constant at its unfavourable end, by the fits that leave one family of runs out.

    python benchmarks/pessimistic.py               # writes catalog/calibrations/pessimistic.toml

A planner's best plan exploits the errors of its model, so it is priced again with these. Run it after fit_costs.py.
"""

from pathlib import Path

from shardwright.cost.calibration import left_out, shipped

HERE = Path(__file__).parent
TARGET = HERE.parent / "src/shardwright/config/catalog/calibrations/pessimistic.toml"
# Constants that make a step longer where they are larger: seconds, shares that are exposed, halves of saturation. Of
# all others, which are shares of a peak, less is worse.
MORE_IS_WORSE = {
    "attention_half", "cast", "expert_exposed", "expert_spread", "gap_s", "imbalance", "inner_half",
    "jitter", "leak", "launch_s", "link_latency_s", "collective_s", "step_s", "tensor_exposed", "tensor_factor",
}  # fmt: skip


def unfavourable(fitted: dict[str, float], folds: dict[str, dict[str, float]]) -> dict[str, float]:
    """The worst of all fits, the one to all families among them."""
    result = {}
    for name in sorted({name for fold in folds.values() for name in fold}):
        values = [fold[name] for fold in folds.values() if name in fold]
        worst = max if name.rpartition(".")[2] in MORE_IS_WORSE else min
        result[name] = worst([*values, fitted[name]] if name in fitted else values)
    return result


def main() -> None:
    """Write the file."""
    result = unfavourable(shipped(), left_out())
    lines = [f'"{name}" = {value:.4g}' for name, value in result.items()]
    TARGET.write_text("\n".join(["# Written by benchmarks/pessimistic.py.", *lines]) + "\n")


if __name__ == "__main__":
    main()
