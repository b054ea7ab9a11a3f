"""The path /v1/responses: turns its requests into chats, and the answers of chats into its items and events."""
