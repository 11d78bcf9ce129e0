"""Training the demo models and drawing the text sample that travel in `eval/demo`."""
