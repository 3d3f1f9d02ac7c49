"""Experiments in the simulator: systems, runs, sweeps and their records."""
