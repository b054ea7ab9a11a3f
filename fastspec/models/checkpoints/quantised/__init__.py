"""Published quantised checkpoints: reads their configs, and converts their tensors to `Codes`."""
