"""The HTTP side of the server: routes, request bodies, answers, limits, errors."""
