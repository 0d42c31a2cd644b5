"""Parameters of public models, from the keys of their configurations, are those that their publishers count.

Counts are of the tensors of released files (a tied head once), as model cards and indices of the files tell them.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.config.hugging_face.config_json import read_model
from shardwright.config.model import ModelSpec
from shardwright.sharding.stage_parameters import num_parameters


def _sizes(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": ffn, "vocab_size": vocab, **more,
    }  # fmt: skip


def _gpt2(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {"n_layer": layers, "n_embd": hidden, "n_head": heads}


def _neox(layers: int, hidden: int, heads: int, vocab: int = 50304) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "intermediate_size": 4 * hidden, "vocab_size": vocab,
    }  # fmt: skip


def _opt(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "ffn_dim": 4 * hidden}


def _bloom(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {"n_layer": layers, "hidden_size": hidden, "n_head": heads, "vocab_size": 250880}


TIED = {"tie_word_embeddings": True}
PUBLIC: dict[str, tuple[str, dict[str, Any], int]] = {
    "Llama-2-7b": ("llama", _sizes(32, 4096, 32, 32, 11008, 32000), 6_738_415_616),
    "Llama-2-13b": ("llama", _sizes(40, 5120, 40, 40, 13824, 32000), 13_015_864_320),
    "Llama-2-70b": ("llama", _sizes(80, 8192, 64, 8, 28672, 32000), 68_976_648_192),
    "Llama-3-8B": ("llama", _sizes(32, 4096, 32, 8, 14336, 128256), 8_030_261_248),
    "Llama-3-70B": ("llama", _sizes(80, 8192, 64, 8, 28672, 128256), 70_553_706_496),
    "Llama-3.1-405B": ("llama", _sizes(126, 16384, 128, 8, 53248, 128256), 405_853_388_800),
    "Llama-3.2-1B": ("llama", _sizes(16, 2048, 32, 8, 8192, 128256, **TIED), 1_235_814_400),
    "Llama-3.2-3B": ("llama", _sizes(28, 3072, 24, 8, 8192, 128256, head_dim=128, **TIED), 3_212_749_824),
    "SmolLM2-135M": ("llama", _sizes(30, 576, 9, 3, 1536, 49152, **TIED), 134_515_008),
    "SmolLM2-360M": ("llama", _sizes(32, 960, 15, 5, 2560, 49152, **TIED), 361_821_120),
    "SmolLM2-1.7B": ("llama", _sizes(24, 2048, 32, 32, 8192, 49152, **TIED), 1_711_376_384),
    "SmolLM3-3B": ("smollm3", _sizes(36, 2048, 16, 4, 11008, 128256), 3_075_098_624),
    "Yi-6B": ("llama", _sizes(32, 4096, 32, 4, 11008, 64000), 6_061_035_520),
    "Mistral-7B-v0.1": ("mistral", _sizes(32, 4096, 32, 8, 14336, 32000), 7_241_732_096),
    "Mistral-7B-v0.3": ("mistral", _sizes(32, 4096, 32, 8, 14336, 32768, sliding_window=None), 7_248_023_552),
    "Mixtral-8x7B": ("mixtral", _sizes(32, 4096, 32, 8, 14336, 32000), 46_702_792_704),
    "Mixtral-8x22B": ("mixtral", _sizes(56, 6144, 48, 8, 16384, 32000), 140_620_634_112),
    "Qwen2-0.5B": ("qwen2", _sizes(24, 896, 14, 2, 4864, 151936, **TIED), 494_032_768),
    "Qwen2.5-1.5B": ("qwen2", _sizes(28, 1536, 12, 2, 8960, 151936, **TIED), 1_543_714_304),
    "Qwen2.5-3B": ("qwen2", _sizes(36, 2048, 16, 2, 11008, 151936, **TIED), 3_085_938_688),
    "Qwen2.5-7B": ("qwen2", _sizes(28, 3584, 28, 4, 18944, 152064), 7_615_616_512),
    "Qwen2.5-14B": ("qwen2", _sizes(48, 5120, 40, 8, 13824, 152064), 14_770_033_664),
    "Qwen2.5-32B": ("qwen2", _sizes(64, 5120, 40, 8, 27648, 152064), 32_763_876_352),
    "Qwen2.5-72B": ("qwen2", _sizes(80, 8192, 64, 8, 29568, 152064), 72_706_203_648),
    "Qwen1.5-MoE-A2.7B": (
        "qwen2_moe",
        _sizes(24, 2048, 16, 16, 5632, 151936, num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408,
               shared_expert_intermediate_size=5632),
        14_315_784_192,
    ),
    "Qwen3-0.6B": ("qwen3", _sizes(28, 1024, 16, 8, 3072, 151936, head_dim=128, **TIED), 596_049_920),
    "Qwen3-1.7B": ("qwen3", _sizes(28, 2048, 16, 8, 6144, 151936, head_dim=128, **TIED), 1_720_574_976),
    "Qwen3-4B": ("qwen3", _sizes(36, 2560, 32, 8, 9728, 151936, head_dim=128, **TIED), 4_022_468_096),
    "Qwen3-8B": ("qwen3", _sizes(36, 4096, 32, 8, 12288, 151936, head_dim=128), 8_190_735_360),
    "Qwen3-14B": ("qwen3", _sizes(40, 5120, 40, 8, 17408, 151936, head_dim=128), 14_768_307_200),
    "Qwen3-32B": ("qwen3", _sizes(64, 5120, 64, 8, 25600, 151936, head_dim=128), 32_762_123_264),
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        _sizes(48, 2048, 32, 4, 6144, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8,
               moe_intermediate_size=768, norm_topk_prob=True),
        30_532_122_624,
    ),
    "Qwen3-235B-A22B": (
        "qwen3_moe",
        _sizes(94, 4096, 64, 4, 12288, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8,
               moe_intermediate_size=1536, norm_topk_prob=True),
        235_093_634_560,
    ),
    "gemma-2b": ("gemma", _sizes(18, 2048, 8, 1, 16384, 256000, head_dim=256), 2_506_172_416),
    "gemma-7b": ("gemma", _sizes(28, 3072, 16, 16, 24576, 256000, head_dim=256), 8_537_680_896),
    "gemma-2-2b": ("gemma2", _sizes(26, 2304, 8, 4, 9216, 256000, head_dim=256), 2_614_341_888),
    "gemma-2-9b": ("gemma2", _sizes(42, 3584, 16, 8, 14336, 256000, head_dim=256), 9_241_705_984),
    "gemma-2-27b": ("gemma2", _sizes(46, 4608, 32, 16, 36864, 256000, head_dim=128), 27_227_128_320),
    "gemma-3-1b": ("gemma3_text", _sizes(26, 1152, 4, 1, 6912, 262144, head_dim=256), 999_885_952),
    "Phi-3-mini": ("phi3", _sizes(32, 3072, 32, 32, 8192, 32064), 3_821_079_552),
    "Phi-3-medium": ("phi3", _sizes(40, 5120, 40, 10, 17920, 32064), 13_960_238_080),
    "phi-4": ("phi3", _sizes(40, 5120, 40, 10, 17920, 100352), 14_659_507_200),
    "OLMo-1B": ("olmo", _sizes(16, 2048, 16, 16, 8192, 50304, **TIED), 1_176_764_416),
    "OLMo-7B": ("olmo", _sizes(32, 4096, 32, 32, 11008, 50304), 6_888_095_744),
    "OLMo-2-7B": ("olmo2", _sizes(32, 4096, 32, 32, 11008, 100352), 7_298_617_344),
    "OLMo-2-13B": ("olmo2", _sizes(40, 5120, 40, 40, 13824, 100352), 13_716_198_400),
    "OLMoE-1B-7B": (
        "olmoe", _sizes(16, 2048, 16, 16, 1024, 50304, num_experts=64, num_experts_per_tok=8), 6_919_161_856,
    ),
    "GLM-4-9B": ("glm", _sizes(40, 4096, 32, 2, 13696, 151552, head_dim=128), 9_399_951_360),
    "GLM-4-9B-0414": ("glm4", _sizes(40, 4096, 32, 2, 13696, 151552, head_dim=128), 9_400_279_040),
    "DeepSeek-V2-Lite": (
        "deepseek_v2",
        _sizes(27, 2048, 16, 16, 10944, 102400, n_routed_experts=64, num_experts_per_tok=6, n_shared_experts=2,
               moe_intermediate_size=1408, first_k_dense_replace=1, q_lora_rank=None, kv_lora_rank=512),
        15_706_484_224,
    ),
    "DeepSeek-V3": (
        "deepseek_v3", _sizes(61, 7168, 128, 128, 18432, 129280, n_shared_experts=1), 671_026_404_352,
    ),
    "starcoder2-3b": ("starcoder2", _sizes(30, 3072, 24, 2, 12288, 49152), 3_030_371_328),
    "starcoder2-7b": ("starcoder2", _sizes(32, 4608, 36, 4, 18432, 49152), 7_173_923_840),
    "starcoder2-15b": ("starcoder2", _sizes(40, 6144, 48, 4, 24576, 49152, tie_word_embeddings=False), 15_957_889_024),
    "gpt2": ("gpt2", _gpt2(12, 768, 12), 124_439_808),
    "gpt2-medium": ("gpt2", _gpt2(24, 1024, 16), 354_823_168),
    "gpt2-large": ("gpt2", _gpt2(36, 1280, 20), 774_030_080),
    "gpt2-xl": ("gpt2", _gpt2(48, 1600, 25), 1_557_611_200),
    "pythia-70m": ("gpt_neox", _neox(6, 512, 8), 70_426_624),
    "pythia-160m": ("gpt_neox", _neox(12, 768, 12), 162_322_944),
    "pythia-1.4b": ("gpt_neox", _neox(24, 2048, 16), 1_414_647_808),
    "pythia-12b": ("gpt_neox", _neox(36, 5120, 40, 50688), 11_846_072_320),
    "gpt-neox-20b": ("gpt_neox", _neox(44, 6144, 64, 50432), 20_554_567_680),
    "opt-125m": ("opt", _opt(12, 768, 12), 125_239_296),
    "opt-1.3b": ("opt", _opt(24, 2048, 32), 1_315_758_080),
    "opt-6.7b": ("opt", _opt(32, 4096, 32), 6_658_473_984),
    "opt-30b": ("opt", _opt(48, 7168, 56), 29_974_540_288),
    "bloom-560m": ("bloom", _bloom(24, 1024, 16), 559_214_592),
    "bloom-7b1": ("bloom", _bloom(30, 4096, 32), 7_069_016_064),
    "bloom": ("bloom", _bloom(70, 14336, 112), 176_247_271_424),
    "falcon-7b": (
        "falcon", {"num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71, "vocab_size": 65024},
        6_921_720_704,
    ),
    "falcon-rw-1b": (
        "falcon",
        {"num_hidden_layers": 24, "hidden_size": 2048, "num_attention_heads": 32, "vocab_size": 50304, "alibi": True,
         "multi_query": False, "parallel_attn": False, "bias": True},
        1_311_625_216,
    ),
    "gpt-oss-20b": (
        "gpt_oss", _sizes(24, 2880, 64, 8, 2880, 201088, head_dim=64, num_local_experts=32), 20_914_757_184,
    ),
    "gpt-oss-120b": (
        "gpt_oss", _sizes(36, 2880, 64, 8, 2880, 201088, head_dim=64, num_local_experts=128), 116_829_156_672,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_parameters_are_those_that_are_published(name: str, tmp_path: Path) -> None:
    family, keys, published = PUBLIC[name]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **keys}))
    assert num_parameters(ModelSpec.model_validate(read_model(str(tmp_path)))) == published
