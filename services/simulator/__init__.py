"""The real scheduler under a modelled executor and a virtual clock: no model, no sockets."""
