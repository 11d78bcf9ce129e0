"""Plans and models: which layers a model has, whether a plan is theirs, and each layer's part of it."""
