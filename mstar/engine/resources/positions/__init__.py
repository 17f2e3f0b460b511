"""Token positions and rotary embedding."""
