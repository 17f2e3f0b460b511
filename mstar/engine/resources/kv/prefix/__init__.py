"""Reusing what earlier requests wrote: keys of page contents, the index over them, and chains of live streams."""
