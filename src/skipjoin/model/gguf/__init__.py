"""Models in GGUF files: headers, settings, tokenizers and weights."""
