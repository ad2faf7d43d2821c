"""The built-in block managers, and what they are made of.

``paged`` and ``radix`` share blocks between requests and differ in how they find prefixes;
``contiguous`` is the baseline that pages nothing.
"""
