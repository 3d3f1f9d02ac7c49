"""Decoders of transformers without a native family: its modeling code over the paged KV cache."""
