"""Models as Hugging Face's config.json describes them, read as fields of [model]."""
