"""Structure of an answer: reasoning, content and calls of tools, read from the model's text while it arrives."""
