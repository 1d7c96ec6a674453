"""A model on a device that draws tokens: its plan, and the devices that run it."""
