"""What steps and transfers cost on this machine: measured, guessed, cached."""
