"""Rehearsal: a policy played against a simulated card in virtual time, by the core that runs the real engine."""
