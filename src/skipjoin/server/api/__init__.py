"""OpenAI-compatible HTTP API of the server."""
