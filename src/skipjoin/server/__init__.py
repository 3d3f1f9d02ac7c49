"""HTTP API in this process (`api`), and engines in their own (`engines`)."""
