"""Pure geometry: which saved slices fill which live ones."""
