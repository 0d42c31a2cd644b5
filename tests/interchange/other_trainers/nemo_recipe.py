"""A recipe for a model of the harbour."""

import nemo_run as run
import torch
from nemo import lightning as nl
from nemo.collections.llm.api import finetune, pretrain
from nemo.collections.llm.gpt.data.mock import MockDataModule
from nemo.collections.llm.gpt.model.llama import Llama3Config8B, LlamaModel
from nemo.collections.llm.peft.lora import LoRA
from nemo.collections.llm.recipes.log.default import default_log, default_resume
from nemo.collections.llm.recipes.optim.adam import distributed_fused_adam_with_cosine_annealing
from nemo.collections.llm.recipes.precision.mixed_precision import bf16_mixed

NAME = "harbour_8b"


@run.cli.factory(name=NAME)
def model():
    return run.Config(LlamaModel, config=run.Config(Llama3Config8B))


def trainer(tensor_parallelism=2, num_nodes=1, num_gpus_per_node=8, max_steps=5000):
    strategy = run.Config(
        nl.MegatronStrategy,
        tensor_model_parallel_size=tensor_parallelism,
        pipeline_model_parallel_size=1,
        pipeline_dtype=torch.bfloat16,
        virtual_pipeline_model_parallel_size=None,
        context_parallel_size=2,
        sequence_parallel=tensor_parallelism > 1,
        gradient_as_bucket_view=True,
        ckpt_async_save=True,
    )
    return run.Config(
        nl.Trainer,
        accumulate_grad_batches=1,
        devices=num_gpus_per_node,
        max_steps=max_steps,
        num_nodes=num_nodes,
        plugins=bf16_mixed(),
        strategy=strategy,
    )


@run.cli.factory(target=pretrain, name=NAME)
def pretrain_recipe(name="default", num_nodes=1, num_gpus_per_node=8, fn=pretrain):
    return run.Partial(
        fn,
        model=model(),
        trainer=trainer(num_nodes=num_nodes, num_gpus_per_node=num_gpus_per_node),
        data=run.Config(MockDataModule, seq_length=8192, global_batch_size=512, micro_batch_size=1),
        log=default_log(name=name),
        optim=distributed_fused_adam_with_cosine_annealing(max_lr=3e-4),
        resume=default_resume(),
    )


@run.cli.factory(target=finetune, name=NAME)
def finetune_recipe(num_nodes=1):
    recipe = pretrain_recipe(num_nodes=num_nodes, fn=finetune)
    recipe.peft = run.Config(LoRA)
    return recipe
