"""Runs a whole model without padding: real tokens are packed into one row, and its outputs are padded again."""
