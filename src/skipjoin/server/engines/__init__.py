"""Engine processes, and messages between them and the API process."""
