"""fastspec inside other frameworks."""
