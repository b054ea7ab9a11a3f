"""Quantised checkpoints as other tools publish them: reads their configs, and converts their tensors to `Codes`."""
