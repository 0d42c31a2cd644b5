"""Fields of attention and positions, drawn at random for a model that was drawn, and rarely what is refused."""

import random
from typing import Any

Fields = dict[str, Any]


def draw_attention(rng: random.Random, model: Fields) -> None:
    """Change some fields of a model."""
    if rng.random() < 0.5:
        return
    if rng.random() < 0.2:
        model["attention_scale"] = rng.choice([0.25, 1.0])
    if "latent" in model and rng.random() < 0.98:
        if "rotary_scaling" in model:
            model["rotary_scaling"]["mscale_all_dim"] = rng.choice([0.0, 1.0])
        return
    for name, values in (("attention_softcap", [0.5, 5.0]), ("sinks", [True]), ("clip_qkv", [0.1, 1.0])):
        if rng.random() < 0.15:
            model[name] = rng.choice(values)
    if rng.random() < 0.4:
        model["window"] = _window(rng, model)
    if rng.random() < 0.3 and (not model.get("bias") or rng.random() < 0.02):
        model["qkv_bias"] = True
    if rng.random() < 0.3 and (model["norm"] == "rmsnorm" or rng.random() < 0.02):
        model["qk_norm"] = "full"
    if model["positions"] != "rotary":
        model["positions"] = rng.choice([model["positions"], "none", "alibi"])
        return
    if rng.random() < 0.3:
        model["qk_norm"] = rng.choice(["l2", "head-turned"])
    width = model.get("head_dim", 0)
    if width > 2 and rng.random() < 0.3:
        width = model["rotary_dim"] = rng.choice([2, width - 2])
    if rng.random() < 0.3:
        model["no_rotary_every"] = rng.choice([1, 2, 3])
        if rng.random() < 0.5:
            model["temperature_tuning"] = {"scale": 0.5, "floor": rng.choice([1, 4])}
    if rng.random() < 0.15:
        model["temperature_tuning"] = {
            "scale": 0.5,
            "floor": rng.choice([1, 4]),
            "in_all_layers": True,
            "first_position": rng.choice([0, 1]),
        }
    if rng.random() < 0.4:
        model["rotary_scaling"] = _scaling(rng, width // 2 if rng.random() < 0.98 else 1)


def _window(rng: random.Random, model: Fields) -> Fields:
    """Layers with a window, shorter than a sequence or not."""
    window: Fields = {"size": rng.randint(1, model["sequence"] + 1), "chunked": rng.random() < 0.3}
    if rng.random() < 0.3 and model["layers"] > 1:
        window["first_full"] = rng.randint(1, model["layers"] - 1)
    if rng.random() < 0.3 and model["layers"] > 1:
        window |= {"full_every": rng.choice([2, 3]), "full_first": rng.random() < 0.3}
    if model["positions"] == "rotary" and rng.random() < 0.3:
        window |= {"rotary_base": rng.choice([0.0, 50.0]), "rotary_scaled": rng.random() < 0.5}
    return window


def _scaling(rng: random.Random, num_pairs: int) -> Fields:
    """A scaling of rotary positions, of sequences that are longer than before or not."""
    kind = rng.choice(["linear", "yarn", "llama3", "longrope"])
    scaling: Fields = {"kind": kind, "factor": rng.choice([1.0, 4.0])}
    if kind != "linear":
        scaling["trained_sequence"] = rng.choice([4, 8])
    if kind in ("yarn", "llama3"):
        scaling |= {"fast": 2.0, "slow": rng.choice([0.25, 1.0])}
    if kind == "yarn":
        scaling |= {"truncate": rng.random() < 0.5, "mscale": rng.choice([0.7, 1.0])}
    if kind == "longrope":
        scaling["short_factors"] = [rng.choice([1.0, 1.5]) for _ in range(num_pairs)]
        scaling["long_factors"] = [rng.choice([2.0, 4.0]) for _ in range(num_pairs)]
    if kind in ("yarn", "longrope") and rng.random() < 0.3:
        scaling["magnitude"] = 1.2
    return scaling
