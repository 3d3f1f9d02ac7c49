"""The API of the server: bodies, endpoints, answers, limits and errors, and the HTTP around them."""
