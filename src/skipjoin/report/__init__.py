"""Reports: files of result records, bounds on their fields, and plots."""
