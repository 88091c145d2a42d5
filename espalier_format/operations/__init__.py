"""What the commands do, without printing: one module per command, each returns a report."""
