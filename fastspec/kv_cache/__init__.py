"""Paged K/V storage: the host's page table and the device's pages."""
