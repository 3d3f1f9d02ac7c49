"""Executors: they do what a plan says."""
