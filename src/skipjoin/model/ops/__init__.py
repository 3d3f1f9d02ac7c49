"""Layer operations other than attention, for CPUs and GPUs."""
