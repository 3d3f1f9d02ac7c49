"""Step and transfer costs on this machine: measured, estimated, cached."""
