"""The engines of a server as the API process holds them: processes, links, replicas, and the messages between."""
