"""What every package may use: environment knobs, errors, logging."""
