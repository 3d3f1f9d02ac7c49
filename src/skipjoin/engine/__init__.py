"""Engine assembly and the loop that drives the engine."""
