"""Programs that judge this package by Transformers' own tests and by all of its families."""
