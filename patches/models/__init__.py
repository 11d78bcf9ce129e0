"""What is known of models: families, names that Transformers gives, and which models can be served."""
