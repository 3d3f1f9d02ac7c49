"""Plots, one module per kind of axes."""
