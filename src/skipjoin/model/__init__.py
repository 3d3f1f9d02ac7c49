"""Models in torch."""
