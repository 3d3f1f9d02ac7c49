"""Output formats of chat models: how reasoning and tool calls are written as text."""
