"""An HTTP server that speaks OpenAI's protocol: `fastspec serve`. Needs the extra `serve`."""
