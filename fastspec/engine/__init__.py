"""The engine: models, device buffers and KV cache pages of a generator. It is built, measured and warmed up here."""
