"""The mstar command."""
