"""How the pages of docs/results came about: studies and the training of the demo models. Not installed."""
