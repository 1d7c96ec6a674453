"""What every process shares: settings, lifecycle, logging, run directory, control endpoint."""
