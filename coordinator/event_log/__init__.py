"""The event log: recording, replay, and explanations made from it. Start with `recorder`."""
