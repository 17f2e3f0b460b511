"""The engine process, its client, their messages and options."""
