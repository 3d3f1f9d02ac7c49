"""From a configuration to a running engine: loading, sizing, scheduling, profiling, and the loop that drives it."""
