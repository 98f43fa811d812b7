"""The paper's experiments: its figures, the demo, and its theory drawn and checked."""
