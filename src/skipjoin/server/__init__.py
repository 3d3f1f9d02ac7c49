"""The server: the API in this process (`api`), engines in processes of their own (`engines`)."""
