"""The machine and the operating system."""
