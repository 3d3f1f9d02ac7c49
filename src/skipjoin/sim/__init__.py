"""The simulator: the engine core on a virtual clock."""
