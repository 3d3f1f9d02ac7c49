"""The machine and the operating system: memory, containers, folders and durable files."""
