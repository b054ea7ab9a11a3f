"""Every op of a step: the interface (`ops.py`), the torch definitions (`reference/`) and the Triton kernels."""
