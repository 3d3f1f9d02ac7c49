"""The server: HTTP on one side, the engine process on the other."""
