"""Ray actors around the machines: the actors carry out effects and bring in events; the machines decide."""
