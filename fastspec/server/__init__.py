"""HTTP server of OpenAI's protocol, for `fastspec serve`."""
