"""Files and batches: the OpenAI Batch API on what chat leaves over. Kept by a store, so that nothing is lost."""
