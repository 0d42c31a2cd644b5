"""A recipe for a model of the harbour."""

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.recipes.common import _peft_common, _pretrain_common
from megatron.bridge.training.mixed_precision import bf16_with_fp8_current_scaling_mixed


def harbour_8b_pretrain_32gpu_h100_config():
    """Pretraining."""
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("harbour/Harbour-8B").to_megatron_provider(load_weights=False)
    cfg.model.tensor_model_parallel_size = 4
    cfg.model.pipeline_model_parallel_size = 2
    cfg.model.virtual_pipeline_model_parallel_size = 4
    cfg.model.pipeline_dtype = torch.bfloat16
    cfg.model.context_parallel_size = 2
    cfg.model.sequence_parallel = True
    cfg.model.seq_length = 8192
    cfg.dataset.seq_length = 8192
    cfg.train.global_batch_size = 512
    cfg.train.micro_batch_size = 1
    cfg.scheduler.lr_warmup_iters = 2000
    cfg.mixed_precision = bf16_with_fp8_current_scaling_mixed()
    cfg.ddp.use_megatron_fsdp = False
    return cfg


def harbour_8b_peft_config():
    """An adapter."""
    cfg = _peft_common()
    cfg.model = AutoBridge.from_hf_pretrained("harbour/Harbour-8B").to_megatron_provider()
    return cfg
