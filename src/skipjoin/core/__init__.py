"""What to run next: the pure scheduling core. Standard library only, and time is always an argument."""
