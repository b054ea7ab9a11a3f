"""Paged KV cache: the page table on the host and the pages on the device."""
