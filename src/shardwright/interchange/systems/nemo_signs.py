"""The signs of NeMo's configurations and scripts, which others with a section `trainer` or `model` do not have."""

from shardwright.interchange.reading.file_signs import GENERAL, SHARED, FileSigns

# Keys of the section `model` that other programs with sections of these names do not have.
_OF_MODELS = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size", "global_batch_size"),
    *("encoder_seq_length", "mcore_gpt", "megatron_amp_O2", "restore_from_path", "num_layers"),
)
SIGNS = (
    FileSigns(
        (
            ("trainer.devices",),
            ("trainer.num_nodes",),
            ("trainer", "exp_manager"),
            ("trainer", "run.results_dir"),
            *(("trainer", f"model.{name}") for name in _OF_MODELS),
            *(("defaults", f"model.{name}") for name in _OF_MODELS),
        ),
        weight=GENERAL,
    ),
    FileSigns(
        commands=(
            r"\s\+{0,2}(?:trainer\.(?:devices|num_nodes|precision|max_steps|gradient_clip_val)|exp_manager(?:\.\w+)?"
            rf"|model\.(?:{'|'.join(_OF_MODELS)}|optim\.\w+|data\.data_prefix))=",
            r"\bmegatron_gpt_(?:pre|continue_)?training\.py\b",
        ),
        weight=SHARED,
    ),
)
