"""Step and transfer costs on this machine."""
