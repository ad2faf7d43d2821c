"""Paged attention by Triton kernels of our own: prefill, split decoding and the cache write."""
