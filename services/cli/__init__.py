"""The `triptych` command."""
