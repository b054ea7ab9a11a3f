"""GGUF files of llama.cpp: their header, the config in their metadata, and their tensors."""
