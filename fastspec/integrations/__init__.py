"""fastspec inside other frameworks, which are extras of the package."""
