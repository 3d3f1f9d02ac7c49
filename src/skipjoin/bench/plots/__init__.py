"""The pictures of result records, one module per way of looking."""
