"""Read models from Hugging Face's config.json as fields of [model], and write them."""
