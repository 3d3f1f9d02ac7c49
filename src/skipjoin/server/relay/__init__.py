"""Console of one or several servers, in a process of its own."""
