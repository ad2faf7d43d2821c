"""Hook specifications, discovery, registry, selection and explain."""
