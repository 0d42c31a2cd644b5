"""Keys by which a configuration is told from data, and its kind from others: those of engines, which say how things are
split, and those of programs' options."""

# Of each kind of engine's configuration.
ENGINE_KEYS = (("distributed_type", "compute_environment"), ("zero_optimization",))
OPTION_KEYS = ("per_device_train_batch_size", "micro_batch_size", "model_name_or_path", "base_model")


def line_beginning(*keys: str) -> str:
    """A pattern for a line of YAML or JSON that begins with one of some keys; re.MULTILINE is wanted."""
    return rf"^[ \t\"'{{]*(?:{'|'.join(keys)})"
