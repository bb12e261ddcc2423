"""Pure machines and rules: events in, effects out. No IO, no clock, no randomness (see PROTOCOL.md)."""
