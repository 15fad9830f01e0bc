"""Model files into device memory: headers, placement, plan, reading."""
