"""Reports: result records and plots."""
