"""The choices behind the core's seams, one file per seam."""
