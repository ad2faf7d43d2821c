"""Model definitions, layers, weight loaders and tokenizers."""
