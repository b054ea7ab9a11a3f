"""/v1/completions and /v1/chat/completions: the shapes of their answers."""
