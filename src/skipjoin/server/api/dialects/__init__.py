"""Other formats of chat, converted to chat requests and back."""
