"""Executors: run the engine's step plans on a model, on ranks, or in simulation."""
