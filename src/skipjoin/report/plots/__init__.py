"""Plots of result records, one module per kind of axes."""
