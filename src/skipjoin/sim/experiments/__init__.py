"""Experiments in the simulator."""
