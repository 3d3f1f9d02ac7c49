"""Executors carry out step plans."""
