"""Demonstration: the same load against several schedulers."""
