"""The gate of a model, by its name."""

from shardwright.config.moe import MoeSpec
from shardwright.model.gates.choice import Gate
from shardwright.model.gates.correlation import Correlation
from shardwright.model.gates.expert_choice import ExpertChoice
from shardwright.model.gates.gshard import GShard
from shardwright.model.gates.sigmoid import Sigmoid
from shardwright.model.gates.softmax import Softmax
from shardwright.model.gates.switch import Switch


def make_gate(spec: MoeSpec) -> Gate:
    """The one that `spec.gate` names."""
    match spec.gate:
        case "softmax":
            return Softmax(spec)
        case "switch":
            return Switch(spec)
        case "gshard":
            return GShard(spec)
        case "sigmoid":
            return Sigmoid(spec)
        case "expert-choice":
            return ExpertChoice(spec)
        case "correlation":
            return Correlation(spec)
