"""The operations of a step: their interface (`ops.py`), definitions in torch (`reference/`) and Triton kernels."""
