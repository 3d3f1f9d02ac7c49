from __future__ import annotations


class ModelError(Exception):
    """The message gives a remedy."""


class AdapterError(ModelError):
    pass
