"""Engine assembly: loading, sizing, scheduling, profiling, and the loop that drives the engine."""
