"""Other formats of chat: each converts its bodies to chat requests, and their output back."""
