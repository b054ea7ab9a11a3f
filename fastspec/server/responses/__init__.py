"""The path /v1/responses: its requests become chats, and answers of chats its items and events."""
