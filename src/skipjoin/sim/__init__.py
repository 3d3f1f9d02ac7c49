"""The simulator: the same engine core on a virtual clock."""
