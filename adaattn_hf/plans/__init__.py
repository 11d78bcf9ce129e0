"""What a layer does about a call: the plan of a model, its choices, and running them."""
