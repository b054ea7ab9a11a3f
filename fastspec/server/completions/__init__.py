"""Bodies and events of the answers of /v1/completions and /v1/chat/completions."""
