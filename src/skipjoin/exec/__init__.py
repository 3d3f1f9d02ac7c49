"""Executors of step plans: on a model, on ranks, or in simulation."""
