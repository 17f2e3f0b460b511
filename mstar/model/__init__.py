"""Model contract, checkpoints, families and shared layers."""
