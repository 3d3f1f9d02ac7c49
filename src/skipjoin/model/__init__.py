"""Models in torch: families, attention, kernels, sampler, loader and tokenizer."""
