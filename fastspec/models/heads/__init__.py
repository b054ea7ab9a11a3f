"""Learned drafters: small models that draft from hidden states of the target, as they are published."""
