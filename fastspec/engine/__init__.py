"""The engine: models, buffers and pages of a generator, and how it is built, measured and warmed up."""
