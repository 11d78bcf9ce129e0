"""Who computes attention: one module or package for each backend, and the choice among them."""
