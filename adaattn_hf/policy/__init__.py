"""Decides from measurements which choices a plan makes; no model runs here, and no tensor of one is touched."""
