"""Learned drafters (heads): small published models that draft from hidden states of the target."""
