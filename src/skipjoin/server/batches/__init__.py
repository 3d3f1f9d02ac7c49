"""OpenAI's Files and Batch APIs, served with spare capacity from a durable store."""
