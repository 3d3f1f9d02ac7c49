from __future__ import annotations


class ModelError(Exception):
    """A model, tokenizer or folder cannot be used; the message gives a remedy."""


class AdapterError(ModelError):
    """An adapter cannot be used with the model."""
